"""An expert layer's LoRA at decode fused with the activation and with the sum over choices. Needs triton."""

from lora_kernels.moe_decode.layer import expand_activate, expand_sum

__all__ = ["expand_activate", "expand_sum"]
