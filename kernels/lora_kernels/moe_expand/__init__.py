"""out += w * B h for (token, expert) pairs. Needs triton."""

from lora_kernels.moe_expand.op import moe_expand_

__all__ = ["moe_expand_"]
