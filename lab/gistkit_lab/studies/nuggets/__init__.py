"""The study `nuggets`."""

PURPOSE = "compare Dodo's learned nuggets with other ways to keep the same number of states of a text"
EXAMPLES = """example: gistkit study nuggets --preset quick --tasks lm --methods sliding,compressive,learned,strided
         gistkit study nuggets --preset paper --device cuda --seeds 3 --resume"""
