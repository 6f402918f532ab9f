"""The study `length`."""

PURPOSE = "compare SeqPE with other position encodings on texts longer than in training"
EXAMPLES = """example: gistkit study length --preset quick --encodings rope-1e4,alibi,seqpe-bias
         gistkit study length --seeds 3 --resume
         gistkit study length --preset seqpe-wikitext --device cuda"""
