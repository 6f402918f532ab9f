"""Shared by the studies of position encodings: `length` and `retrieval` use most of it, `resolution` some."""
