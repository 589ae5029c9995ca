"""What the GPU path changes in vLLM: the punica wrapper, experts classes with LoRA in their seams, routers' adapters connected,
released slots zeroed."""

from typing import Any

from vllm import envs
from vllm.model_executor.layers.fused_moe.oracle import mxfp4
from vllm.platforms.cuda import CudaPlatformBase

from lora_kernels.vllm_plugin.adapter_facts import tell_adapter_facts
from lora_kernels.vllm_plugin.router_gates import serve_router_adapters
from lora_kernels.vllm_plugin.slots import zero_slots_on_release

WRAPPER = "lora_kernels.vllm_plugin.gpu_wrapper.GpuLoraWrapper"


def install() -> None:
    """Changes vLLM in this process. Call it once."""
    CudaPlatformBase.get_punica_wrapper = classmethod(lambda _: WRAPPER)
    # Part of the key of vLLM's cache of compiled graphs: ours call another operation than those of stock vLLM.
    envs.environment_variables["TENANTRY_KERNELS"] = lambda: "on"
    _keep_mxfp4_weights()
    _serve_seams()
    serve_router_adapters()
    zero_slots_on_release()
    tell_adapter_facts()


def _keep_mxfp4_weights() -> None:
    """MXFP4 experts keep their matmul_ogs weights when LoRA is on, where vLLM would go to Marlin's."""
    stock = mxfp4.backend_to_kernel_cls

    def backend_to_kernel_cls(backend: mxfp4.Mxfp4MoeBackend) -> list[type]:
        if backend not in (mxfp4.Mxfp4MoeBackend.TRITON, mxfp4.Mxfp4MoeBackend.TRITON_UNFUSED):
            return stock(backend)
        from lora_kernels.vllm_plugin.oai_experts import OaiLoraExperts

        # The first that fits is taken: vLLM's classes for TRITON have no LoRA, and serve where it is off.
        return [*stock(backend), OaiLoraExperts] if backend == mxfp4.Mxfp4MoeBackend.TRITON else [OaiLoraExperts]

    mxfp4.backend_to_kernel_cls = backend_to_kernel_cls


def _serve_seams() -> None:
    """The experts of a layer that gets adapters are of the class with seams, if theirs has one."""
    from vllm.lora.layers import FusedMoEWithLoRA

    set_mapping = FusedMoEWithLoRA.set_mapping

    def set_mapping_with_seams(self: FusedMoEWithLoRA, punica_wrapper: Any) -> None:
        from lora_kernels.vllm_plugin.expert_seams import WITH_SEAMS

        experts = self._moe_kernel.fused_experts
        experts.__class__ = WITH_SEAMS.get(type(experts), type(experts))
        set_mapping(self, punica_wrapper)

    FusedMoEWithLoRA.set_mapping = set_mapping_with_seams
