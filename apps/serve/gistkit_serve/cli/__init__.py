"""The commands of the server and of stores."""
