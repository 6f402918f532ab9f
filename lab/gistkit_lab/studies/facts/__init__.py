"""The study `facts`."""

PURPOSE = "look up facts in filler behind one token in eight: does Dodo's scorer learn which to keep?"
EXAMPLES = """example: gistkit study facts --selections learned,random
         gistkit study facts --seeds 3 --resume"""
