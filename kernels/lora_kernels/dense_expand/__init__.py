"""out += B h for dense layers of one to three slices. Needs triton."""

from lora_kernels.dense_expand.op import dense_expand_

__all__ = ["dense_expand_"]
