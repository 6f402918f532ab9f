"""The study `epl`."""

PURPOSE = "compare position layouts (DPL, UPL, EPL) on a small autoencoder"
EXAMPLES = "example: gistkit study epl --text book.txt --layouts dpl,epl --resume"
