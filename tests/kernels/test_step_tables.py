"""The tables of a step, made on the host, hold what vLLM's own code makes of the same mapping on the device."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from lora_kernels.vllm_plugin.step_tables import StepTables, slots_of
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.utils import convert_mapping

SLOT_IDS = [9, None, 7]
SLOTS, MAX_ROWS, VOCAB = 3, 12, 1000
MIXED = ((7, 7, 0, 9, 9, 9), (7, 0, 9))


@pytest.fixture
def kernel_meta(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's dataclass, from its file: the package beside it wants triton."""
    path = Path(vllm.__file__).parent / "lora/ops/triton_ops/lora_kernel_metadata.py"
    spec = importlib.util.spec_from_file_location("lora_kernel_metadata", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lora_kernel_metadata", module)
    spec.loader.exec_module(module)
    return module.LoRAKernelMeta


ENGINE: dict[str, Any] = {"slot_ranks": [8, 16, 32], "max_loras": SLOTS + 1, "vocab_size": VOCAB}


def make(kernel_meta: Any, counts: list[int]) -> tuple[SimpleNamespace, tuple[Any, Any], StepTables]:
    wrapper = SimpleNamespace(device=torch.device("cpu"))
    metas = (kernel_meta.make(SLOTS, MAX_ROWS, "cpu", counts), kernel_meta.make(SLOTS, MAX_ROWS, "cpu", counts))
    return wrapper, metas, StepTables(wrapper, metas, max_rows=MAX_ROWS, max_loras=SLOTS)


@pytest.mark.parametrize("mapping", [MIXED, ((0, 0, 0), (0,)), ((7,), (7,)), ((9,) * 12, (9, 9))], ids=str)
@pytest.mark.parametrize("counts", [[], [1, 2, 4]], ids=str)
def test_they_hold_what_vllm_makes_of_the_mapping(kernel_meta: Any, mapping: tuple[Any, Any], counts: list[int]) -> None:
    wrapper, metas, tables = make(kernel_meta, counts)
    tables.write(slots_of((9, 7, 0, 9), SLOT_IDS), slots_of((9, 9), SLOT_IDS), **ENGINE)

    rows = [slots_of(ids, SLOT_IDS) for ids in mapping]
    tables.write(*rows, **ENGINE)

    tokens, samples, padded, embeddings, _ = convert_mapping(LoRAMapping(*mapping), SLOT_IDS, SLOTS + 1, VOCAB, "cpu")
    assert tables.slot_ranks.tolist() == [8, 16, 32]
    assert wrapper._token_lora_indices[: len(tokens)].equal(tokens)
    assert wrapper._sampler_indices[: len(samples)].equal(samples)
    assert wrapper._sampler_indices_padded[: len(padded)].equal(padded)
    assert wrapper._embeddings_indices[1, : len(tokens)].equal(embeddings.view(-1, len(tokens))[-1])
    for meta, indices in zip(metas, (tokens, samples), strict=True):
        stock = kernel_meta.make(SLOTS, MAX_ROWS, "cpu", counts)
        stock.prepare_tensors(indices)
        groups = len(indices.unique()) if (indices >= 0).any() else 0
        assert meta.no_lora_flag_cpu.equal(stock.no_lora_flag_cpu)
        assert meta.num_active_loras_cpu.equal(stock.num_active_loras_cpu)
        assert meta.active_lora_ids.equal(stock.active_lora_ids)
        assert meta.num_tokens_per_lora.equal(stock.num_tokens_per_lora)
        assert meta.lora_token_start_loc[: groups + 1].equal(stock.lora_token_start_loc[: groups + 1])
        assert meta.token_lora_mapping[: len(indices)].equal(indices.int())
        if groups:
            order, stock_order = meta.token_indices_sorted_by_lora_ids, stock.token_indices_sorted_by_lora_ids
            assert order[: len(indices)].equal(stock_order[: len(indices)])


def test_rows_beyond_the_step_have_no_adapter_whatever_the_step_before_had(kernel_meta: Any) -> None:
    _, (tokens, _), tables = make(kernel_meta, [])
    address = tokens.token_lora_mapping.data_ptr()

    tables.write(slots_of((7,) * MAX_ROWS, SLOT_IDS), slots_of((7,), SLOT_IDS), **ENGINE)
    tables.write(slots_of((9, 7), SLOT_IDS), slots_of((9, 7), SLOT_IDS), **ENGINE)

    assert tokens.token_lora_mapping.tolist() == [0, 2] + [-1] * (MAX_ROWS - 2)
    assert tokens.token_lora_mapping.data_ptr() == address


def test_an_adapter_that_is_in_no_slot_is_an_error() -> None:
    with pytest.raises(KeyError, match="8"):
        slots_of((7, 8), SLOT_IDS)
