"""GPT, a language model that takes any position encoding, and its layers."""
