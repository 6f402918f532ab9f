"""The lab's commands, a file for each."""
