"""The study `compression-loss`."""

PURPOSE = "train the same autoencoder with and without compression loss, autoencoding loss and spread position ids"
EXAMPLES = "example: gistkit study compression-loss --seeds 3"
