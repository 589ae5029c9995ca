"""A packed slot holds the adapter's values where the engine looks for them, and nothing of whoever was there before."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from services.worker.engine_image import PIECE_BYTES, Form, Part, SlotLayout, pack, place, sums_of
from shared.errors import LoadFailed

RANK, MAX_RANK, EXPERTS, HIDDEN, WIDE = 2, 4, 3, 8, 6
Q, GATE = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.{}.gate_proj"
FUSED = "model.layers.0.mlp.experts"


def layout(dtype: str = "float32") -> SlotLayout:
    each = tuple(GATE.format(expert) for expert in range(EXPERTS))
    return place(
        dtype,
        MAX_RANK,
        [
            Part(module="qkv", side="A", form=Form.PLAIN, shape=(1, MAX_RANK, HIDDEN), sources=(Q,)),
            Part(module="qkv", side="B", form=Form.PLAIN, shape=(1, WIDE, MAX_RANK), sources=(Q,)),
            Part(module="experts", side="A", form=Form.EXPERTS, shape=(EXPERTS, MAX_RANK, HIDDEN), sources=each),
            Part(module="experts", side="B", form=Form.EXPERTS, shape=(EXPERTS, WIDE, MAX_RANK), sources=each),
            Part(module="fused", side="A", form=Form.FUSED, shape=(EXPERTS, MAX_RANK, HIDDEN), sources=(FUSED,)),
            Part(module="fused", side="B", form=Form.FUSED, shape=(EXPERTS, WIDE, MAX_RANK), sources=(FUSED,)),
        ],
    )


def numbers(*shape: int, start: int = 1) -> Any:
    return np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)


def tensors() -> dict[str, Any]:
    made = {f"base_model.model.{Q}.lora_A.weight": numbers(RANK, HIDDEN), f"base_model.model.{Q}.lora_B.weight": numbers(WIDE, RANK)}
    for expert in range(EXPERTS):
        name = f"base_model.model.{GATE.format(expert)}"
        made[f"{name}.lora_A.weight"] = numbers(RANK, HIDDEN, start=100 * expert + 1)
        made[f"{name}.lora_B.weight"] = numbers(WIDE, RANK, start=100 * expert + 1)
    made[f"base_model.model.{FUSED}.lora_A.weight"] = numbers(EXPERTS * RANK, HIDDEN)
    made[f"base_model.model.{FUSED}.lora_B.weight"] = numbers(WIDE, RANK * EXPERTS)
    return made


def adapter(folder: Path, given: dict[str, Any], **config: Any) -> Path:
    save_file(given, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": RANK, **config}))
    return folder


def packed_slots(folder: Path, dtype: str = "float32") -> dict[tuple[str, str], Any]:
    """By module and side; the image held 0xff before."""
    here = layout(dtype)
    image = np.full(here.image_bytes, 0xFF, np.uint8)
    packed = pack(folder, here, image)
    found: dict[tuple[str, str], Any] = {}
    sums: list[int] = []
    for part in here.parts:
        raw = image[part.offset : part.offset + here.part_bytes(part)]
        sums += sums_of(raw)
        found[part.module, part.side] = raw.view(dtype).reshape(part.shape)
    assert packed.sums == tuple(sums)
    return found


def test_every_value_lies_in_its_expert_and_rank_and_the_rest_is_zero(tmp_path: Path) -> None:
    given = tensors()
    slots = packed_slots(adapter(tmp_path, given))
    assert (slots["qkv", "A"][0, :RANK] == given[f"base_model.model.{Q}.lora_A.weight"]).all()
    assert (slots["qkv", "B"][0, :, :RANK] == given[f"base_model.model.{Q}.lora_B.weight"]).all()
    fused_a, fused_b = given[f"base_model.model.{FUSED}.lora_A.weight"], given[f"base_model.model.{FUSED}.lora_B.weight"]
    for expert in range(EXPERTS):
        name = f"base_model.model.{GATE.format(expert)}"
        assert (slots["experts", "A"][expert, :RANK] == given[f"{name}.lora_A.weight"]).all()
        assert (slots["experts", "B"][expert, :, :RANK] == given[f"{name}.lora_B.weight"]).all()
        assert (slots["fused", "A"][expert, :RANK] == fused_a[expert * RANK : (expert + 1) * RANK]).all()
        for rank in range(RANK):
            assert (slots["fused", "B"][expert, :, rank] == fused_b[:, rank * EXPERTS + expert]).all()
    assert not any(slot[:, RANK:].any() for (_, side), slot in slots.items() if side == "A")
    assert not any(slot[:, :, RANK:].any() for (_, side), slot in slots.items() if side == "B")


def test_experts_that_the_engine_has_padded_hold_the_adapter_and_zeros(tmp_path: Path) -> None:
    narrow = {name: tensor[:, : HIDDEN - 2] if "lora_A" in name and "q_proj" not in name else tensor for name, tensor in tensors().items()}
    slots = packed_slots(adapter(tmp_path, {name: np.ascontiguousarray(tensor) for name, tensor in narrow.items()}))
    for kind in ("experts", "fused"):
        assert slots[kind, "A"][:, :RANK, : HIDDEN - 2].all() and not slots[kind, "A"][:, :, HIDDEN - 2 :].any()


def test_modules_that_the_adapter_leaves_alone_are_zero(tmp_path: Path) -> None:
    only_q = {name: tensor for name, tensor in tensors().items() if Q in name}
    slots = packed_slots(adapter(tmp_path, only_q))
    assert slots["qkv", "A"].any() and not slots["experts", "A"].any() and not slots["fused", "B"].any()


@pytest.mark.parametrize(("config", "scaling"), [({"lora_alpha": 8}, 4.0), ({"lora_alpha": 8, "use_rslora": True}, 8 / 2**0.5)])
def test_a_scaling_goes_into_b_alone(tmp_path: Path, config: dict[str, Any], scaling: float) -> None:
    given = tensors()
    slots = packed_slots(adapter(tmp_path, given, **config))
    assert (slots["qkv", "A"][0, :RANK] == given[f"base_model.model.{Q}.lora_A.weight"]).all()
    assert (slots["qkv", "B"][0, :, :RANK] == given[f"base_model.model.{Q}.lora_B.weight"] * np.float32(scaling)).all()


def test_packing_says_what_changed_and_what_is_the_adapters_own(tmp_path: Path) -> None:
    folder = adapter(tmp_path, {name: tensor for name, tensor in tensors().items() if FUSED not in name or ".gate_proj." in name})
    here = layout()
    packed = pack(folder, here, np.zeros(here.image_bytes, np.uint8))
    assert packed.modules == ("experts", "qkv")
    assert packed.true_bytes == 4 * (1 + EXPERTS) * RANK * (HIDDEN + WIDE)
    assert packed.rank == RANK


def drop(given: dict[str, Any], part: str) -> dict[str, Any]:
    return {name: tensor for name, tensor in given.items() if part not in name}


@pytest.mark.parametrize(
    ("given", "config", "reason", "words"),
    [
        (tensors(), {"r": 5}, "refused_by_engine", "rank 5"),
        (tensors(), {"r": 1, "lora_alpha": 1}, "refused_by_engine", "has shape"),
        (tensors(), {"rank_pattern": {"q_proj": 1}}, "refused_by_engine", "rank_pattern"),
        (tensors(), {"modules_to_save": ["lm_head"]}, "refused_by_engine", "modules_to_save"),
        (tensors(), {"bias": "all"}, "refused_by_engine", "biases"),
        ({**tensors(), f"base_model.model.{Q}.lora_A.weight": numbers(RANK, HIDDEN - 1)}, {}, "refused_by_engine", "has shape"),
        ({**tensors(), f"base_model.model.{FUSED}.lora_B.weight": numbers(WIDE + 1, RANK * EXPERTS)}, {}, "refused_by_engine", "has shape"),
        (drop(tensors(), "q_proj.lora_B"), {}, "refused_by_engine", "only one of"),
        ({**tensors(), "something": numbers(1)}, {}, "refused_by_engine", "not a LoRA tensor"),
        ({**tensors(), "x.y.lora_A.weight": numbers(2, 2), "x.y.lora_B.weight": numbers(2, 2)}, {}, "unmatched_modules", "x.y"),
        ({"x.y.lora_A.weight": numbers(2, 2), "x.y.lora_B.weight": numbers(2, 2)}, {}, "no_module_matched", "no module"),
    ],
)
def test_what_does_not_fit_the_slots_is_refused(
    tmp_path: Path, given: dict[str, Any], config: dict[str, Any], reason: str, words: str
) -> None:
    folder = adapter(tmp_path, given, **config)
    here = layout()
    with pytest.raises(LoadFailed, match=words) as failed:
        pack(folder, here, np.zeros(here.image_bytes, np.uint8))
    assert failed.value.fields["reason"] == reason


def test_each_piece_of_a_part_has_its_own_sum() -> None:
    part = np.zeros(2 * PIECE_BYTES + 8, np.uint8)
    part.view(np.int32)[[0, PIECE_BYTES // 4, -1]] = (5, -7, 9)
    assert sums_of(part) == [5, -7, 9]
