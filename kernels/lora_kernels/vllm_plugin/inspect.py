"""What runs inside the engine's worker process for the service outside: slots, their contents and their cost.

Give `lora_kernels.vllm_plugin.inspect.WorkerInspection` as vLLM's `worker_extension_cls` and call the methods by name
with `collective_rpc`; each worker answers with plain values.
"""

from typing import TYPE_CHECKING, Any

from lora_kernels.vllm_plugin.registration import status
from lora_kernels.vllm_plugin.slots import slot_bytes, slot_is_zero, slot_tensors, zero_slot

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager


class WorkerInspection:
    """Methods mixed into vLLM's worker class."""

    model_runner: Any

    def tenantry_plugin(self) -> dict[str, Any]:
        """The plugin's status in the worker process, and the classes that serve LoRA there."""
        manager = _manager(self)
        plugin = status()
        kernels = (vars(module).get("_moe_kernel") for module in manager.modules.values())
        return {
            "active": plugin.active,
            "code": plugin.code,
            "reason": plugin.reason,
            "lora_is_right": plugin.lora_is_right,
            "wrappers": sorted({type(w).__name__ for w in manager.punica_wrapper_mapping.values()}),
            "experts": sorted({type(k.fused_experts).__name__ for k in kernels if k is not None}),
        }

    def tenantry_warm_up(self) -> float:
        """Runs every LoRA kernel that serving may choose once; the seconds it took. Where no kernel is compiled: 0."""
        manager = _manager(self)
        if not status().active or manager.device.type != "cuda":
            return 0.0
        from lora_kernels.vllm_plugin.warm_up import warm_up

        return warm_up(manager, most_tokens=self.model_runner.max_num_tokens)

    def tenantry_slots(self) -> dict[str, Any]:
        """Slots by index: the adapter id each holds (None: free) and whether its tensors are all zero; and their bytes.

        registered: ids the engine lists, in a slot or not. slot_bytes: one slot as allocated. bytes_per_rank: what one
        unit of rank takes of it. total_bytes: all slots.
        """
        manager = _manager(self)
        return {
            "registered": sorted(manager.list_adapters()),
            "slots": [
                {"index": index, "lora_int_id": lora_int_id, "all_zero": slot_is_zero(manager, index)}
                for index, lora_int_id in enumerate(manager.lora_index_to_id)
            ],
            "max_rank": manager.lora_config.max_lora_rank,
            "slot_bytes": slot_bytes(manager),
            "bytes_per_rank": slot_bytes(manager, rank=1),
            "total_bytes": sum(stack.numel() * stack.element_size() for stack in slot_tensors(manager)),
        }

    def tenantry_kv_groups(self) -> list[dict[str, int]]:
        """Groups of layers with KV blocks of their own: tokens of a block, and the most tokens of a sequence that they keep (0: all)."""
        runner = self.model_runner
        specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
        in_flight = 2 * runner.vllm_config.scheduler_config.max_num_batched_tokens  # a step and the one scheduled behind it
        found: list[dict[str, int]] = []
        for spec in specs:
            window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0
            found.append({"block_tokens": spec.block_size, "most_tokens": window - 1 + in_flight if window else 0})
        return found

    def tenantry_slot_bytes(self, rank: int) -> int:
        """Bytes of a slot that an adapter of `rank` fills."""
        return slot_bytes(_manager(self), rank=rank)

    def tenantry_adapter_modules(self, lora_int_id: int) -> list[str]:
        """The base model's modules that the adapter changes, as the engine names them; empty for an unknown adapter."""
        manager = _manager(self)
        adapter = manager.list_adapters().get(lora_int_id)
        if adapter is None:
            return []
        return sorted(name for name in manager.modules if manager._get_lora_layer_weights(adapter, name))

    def tenantry_unmatched_modules(self, lora_int_id: int) -> list[str]:
        """The adapter's modules for which the engine has no place: their weights do nothing."""
        manager = _manager(self)
        adapter = manager.list_adapters().get(lora_int_id)
        if adapter is None:
            return []
        matched = {id(manager._get_lora_layer_weights(adapter, name)) for name in manager.modules}
        # Fused experts come as two entries, of which vLLM moves the first into the second.
        fused = {f"{name}.base_layer" for name in manager.modules if id(adapter.loras.get(name)) in matched}
        return sorted(name for name, weights in adapter.loras.items() if id(weights) not in matched and name not in fused)

    def tenantry_zero_slot(self, slot_index: int) -> bool:
        """Zeroes a free slot and reads it back: true if it is free and all zero. A slot in use is left alone: false."""
        manager = _manager(self)
        if manager.lora_index_to_id[slot_index] is not None:
            return False
        zero_slot(manager, slot_index)
        return slot_is_zero(manager, slot_index)


def _manager(worker: WorkerInspection) -> "LoRAModelManager":
    return worker.model_runner.lora_manager._adapter_manager
