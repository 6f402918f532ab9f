"""The study `compression-loss`."""

PURPOSE = "pretrain an autoencoder with and without each loss and spread position ids, then fine-tune every one alike"
EXAMPLES = """example: gistkit study compression-loss --settings without-cl,without-ae,without-ae-cl
         gistkit study compression-loss --seeds 3 --resume"""
