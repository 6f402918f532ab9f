"""What the studies of position encodings share; `length` and `retrieval` most of it, `resolution` some."""
