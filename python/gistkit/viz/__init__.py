"""Pictures (`pip install gistkit[viz]`). Every function returns a figure and opens no window."""
