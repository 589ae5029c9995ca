"""Searches tiles for a model on this GPU: `python -m lora_kernels.tune`."""

from lora_kernels.tune.files import write

__all__ = ["write"]
