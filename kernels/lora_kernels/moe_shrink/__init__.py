"""h = A x for (token, expert) pairs. Needs triton."""

from lora_kernels.moe_shrink.op import moe_shrink

__all__ = ["moe_shrink"]
