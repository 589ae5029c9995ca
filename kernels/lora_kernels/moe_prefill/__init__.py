"""An expert layer's LoRA at prefill, fused with the activation and with the sum over choices."""

from lora_kernels.moe_prefill.activation import Activation
from lora_kernels.moe_prefill.layer import combine, expand_activate, group_tokens, shrink
from lora_kernels.moe_prefill.plan import PrefillPlan, SumTiles, Tiles, TokenTiles, plan_prefill
from lora_kernels.moe_prefill.weights import ExpertLora

__all__ = [
    "Activation",
    "ExpertLora",
    "PrefillPlan",
    "SumTiles",
    "Tiles",
    "TokenTiles",
    "combine",
    "expand_activate",
    "group_tokens",
    "plan_prefill",
    "shrink",
]
