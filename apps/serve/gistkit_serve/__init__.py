"""The server of memories, and the stores of many."""
