"""vLLM reads gistkit's memories: `gistkit export` writes them, `gistkit-vllm` serves them."""
