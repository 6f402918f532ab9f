"""What command lines share: kinds of arguments, the model and the compressor that they name, and texts to read."""
