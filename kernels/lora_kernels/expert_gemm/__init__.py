"""The base model's expert products, laid out so that a row's bits do not depend on how other rows are routed."""

from lora_kernels.expert_gemm.reference import expert_gemm

__all__ = ["expert_gemm"]
