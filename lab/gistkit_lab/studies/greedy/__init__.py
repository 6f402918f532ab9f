"""The study `greedy`."""

PURPOSE = "swap Dodo's nuggets one by one for better ones: how many stay, and how much the loss falls"
EXAMPLES = """\
example: gistkit study greedy --model smollm2 --compressor runs/dodo/compressor --texts book.txt --passages 4
example: gistkit study greedy --model ./llama --compressor runs/dodo/compressor --texts wiki/ --device cuda \
--passages 1000"""
