"""What all packages and the distributions beside this one use: checks, messages, safe files, Ctrl-C, processes."""
