"""Which of an expert layer's two ways serves a batch: `moe_lora_` around the base's own activation and sum, or `moe_prefill`."""

from typing import Literal

from lora_kernels.configs.plans import LayerShape
from lora_kernels.moe_prefill.weights import MAX_RANK

PREFILL_FROM_TOKENS = 257
"""Measured on an H200, activation and sum counted on both sides. At 256 tokens of eight adapters decode takes 95 us a layer for
GPT-OSS-20B and 152 for Qwen3-30B-A3B, prefill 93 and 171; with one adapter at 512 prefill takes two thirds of decode's time."""


def choose_path(shape: LayerShape) -> Literal["decode", "prefill"]:
    """The faster of the two that can serve the shape, from host-known numbers alone."""
    return "prefill" if shape.num_tokens >= PREFILL_FROM_TOKENS and shape.rank <= MAX_RANK else "decode"
