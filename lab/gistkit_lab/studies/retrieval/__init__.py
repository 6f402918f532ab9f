"""The study `retrieval`."""

PURPOSE = "compare SeqPE with other position encodings on looking up facts in contexts longer than in training"
EXAMPLES = """example: gistkit study retrieval --preset quick --encodings nope,rope-1e4,seqpe-bias
         gistkit study retrieval --seeds 3 --resume
         gistkit study retrieval --preset seqpe-squad --questions train-v2.0.json --test-questions dev-v2.0.json"""
