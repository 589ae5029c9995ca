"""The vLLM plugin: vLLM calls `register` in each of its processes, `status` says what it did in this one."""

from lora_kernels.vllm_plugin.registration import PluginStatus, register, status

__all__ = ["PluginStatus", "register", "status"]
