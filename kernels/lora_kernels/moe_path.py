"""Which of an expert layer's two ways serves a batch: `moe_lora_` around the base's own activation and sum, or `moe_prefill`."""

from typing import Literal

from lora_kernels.configs.plans import LayerShape
from lora_kernels.moe_prefill.weights import MAX_RANK

PREFILL_FROM_TOKENS = 256
"""Measured on an H200, activation and sum counted on both sides: from here the grouped kernels win with one adapter and with eight."""


def choose_path(shape: LayerShape) -> Literal["decode", "prefill"]:
    """The faster of the two that can serve the shape, from host-known numbers alone."""
    return "prefill" if shape.num_tokens >= PREFILL_FROM_TOKENS and shape.rank <= MAX_RANK else "decode"
