"""The study `compression-loss`."""

PURPOSE = "pretrain an autoencoder with and without each loss and spread position IDs, then fine-tune each"
EXAMPLES = """example: gistkit study compression-loss --settings without-cl,without-ae,without-ae-cl
         gistkit study compression-loss --seeds 3 --resume"""
