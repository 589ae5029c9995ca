"""Multi-LoRA operations: plain torch references, one folder per op, and the vLLM plugin that uses them."""
