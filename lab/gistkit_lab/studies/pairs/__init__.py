"""The study `pairs`."""

PURPOSE = "look up keys and values in contexts that methods compress in place: does GistPool learn more than means?"
EXAMPLES = """example: gistkit study pairs --methods avgpool,gistpool --ratios 5,10
         gistkit study pairs --preset varied --seeds 3 --resume"""
