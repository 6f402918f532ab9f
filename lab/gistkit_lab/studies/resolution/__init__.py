"""The study `resolution`."""

PURPOSE = "compare SeqPE with other position encodings on images larger than in training"
EXAMPLES = """example: gistkit study resolution --preset quick --encodings learned-2d,rope-2d-mix,seqpe-mul
         gistkit study resolution --data fashion-mnist --seeds 3 --resume
         gistkit study resolution --preset seqpe-imagenet --data imagenet/ --device cuda"""
