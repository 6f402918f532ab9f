"""The study `facts`."""

PURPOSE = "look up facts in filler when Dodo keeps one token in eight: does its scorer learn which?"
EXAMPLES = """example: gistkit study facts --selections learned,random
         gistkit study facts --seeds 3 --resume"""
