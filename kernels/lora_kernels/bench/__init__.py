"""Benchmarks under CUDA-graph replay with cold weights, vLLM's own kernels beside ours. `python -m lora_kernels.bench`."""
