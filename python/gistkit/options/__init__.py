"""Options shared by commands: argument types, models and compressors by name, texts and output files."""
