"""h = A x for dense layers of one to three slices. Needs triton."""

from lora_kernels.dense_shrink.op import dense_shrink

__all__ = ["dense_shrink"]
