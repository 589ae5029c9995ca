"""h = A x for dense layers of one to three slices. Needs triton."""

from lora_kernels.dense_shrink.op import dense_shrink
from lora_kernels.dense_shrink.paths import needs_token_list
from lora_kernels.dense_shrink.token_list import TokenList, list_tokens

__all__ = ["TokenList", "dense_shrink", "list_tokens", "needs_token_list"]
