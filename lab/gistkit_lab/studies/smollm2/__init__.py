"""The study `smollm2`."""

PURPOSE = "compare position layouts on SmolLM2-135M, frozen, with LoRA in the encoder"
EXAMPLES = "example: gistkit study smollm2 --method icae --layouts dpl,epl --seeds 3"
