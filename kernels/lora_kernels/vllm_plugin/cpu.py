"""What the CPU path changes in vLLM: the punica wrapper, the experts class, routers' adapters connected, released slots zeroed."""

from vllm.model_executor.layers.fused_moe.oracle import unquantized
from vllm.platforms.cpu import CpuPlatform

from lora_kernels.vllm_plugin.router_gates import serve_router_adapters
from lora_kernels.vllm_plugin.slots import zero_slots_on_release

WRAPPER = "lora_kernels.vllm_plugin.cpu_wrapper.CpuLoraWrapper"


def install() -> None:
    """Changes vLLM in this process. Call it once."""
    CpuPlatform.get_punica_wrapper = classmethod(lambda _: WRAPPER)
    _serve_experts_without_triton()
    serve_router_adapters()
    zero_slots_on_release()


def _serve_experts_without_triton() -> None:
    """With LoRA on, vLLM picks its Triton experts whatever the platform: on a CPU that choice now gives ours."""
    stock = unquantized.backend_to_kernel_cls

    def backend_to_kernel_cls(backend: unquantized.UnquantizedMoeBackend) -> list[type]:
        if backend != unquantized.UnquantizedMoeBackend.TRITON:
            return stock(backend)
        from lora_kernels.vllm_plugin.cpu_experts import CpuLoraExperts

        return [CpuLoraExperts]

    unquantized.backend_to_kernel_cls = backend_to_kernel_cls
