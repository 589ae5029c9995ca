"""How weights get into slots, told to an engine that only records: which calls, in which order, and what becomes of their answers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.worker import vllm_loading
from services.worker.engine_host_tier import Image
from services.worker.engine_image import Form, Packed, Part, SlotLayout, place
from services.worker.vllm_loading import StagedLoading, StockLoading, choose_loading, names_in_files
from shared.contracts.base import BaseDescription, Module
from shared.errors import LoadFailed

REQUEST = SimpleNamespace(lora_int_id=7, lora_name="ad")
FOLDER = Path("/adapters/one")
PACKED = Packed(rank=8, modules=("q",), sums=(1, 2), true_bytes=40, file_bytes=50)
COPYING, MOUNTED = {"state": "copying"}, {"state": "mounted", "copy_ms": 1.0, "register_ms": 0.1}


class RecordingEngine:
    """Answers each method with what it was given for it, the last one for ever."""

    def __init__(self, workers: int = 1, **answers: Any) -> None:
        self.answers = {name: list(found) if isinstance(found, tuple) else [found] for name, found in answers.items()}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.workers = workers

    async def collective_rpc(self, method: str, timeout: float, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append((method, args))
        found = self.answers[method]
        return [found.pop(0) if len(found) > 1 else found[0]] * self.workers

    async def add_lora(self, request: Any) -> bool:
        self.calls.append(("add_lora", (request,)))
        return self.answers.get("add_lora", [True])[0]

    async def remove_lora(self, int_id: int) -> bool:
        self.calls.append(("remove_lora", (int_id,)))
        return True

    async def pin_lora(self, int_id: int) -> bool:
        self.calls.append(("pin_lora", (int_id,)))
        return True

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


class OneImage:
    def __init__(self) -> None:
        self.layout: SlotLayout = place("float32", 8, [Part(module="q", side="A", form=Form.PLAIN, shape=(1, 8, 8), sources=("q",))])
        self.image = Image(3, PACKED, 12.5, "{{ template }}")
        self.held = False
        self.dropped: list[Path] = []

    def find(self, folder: Path) -> Image | None:
        return self.image if self.held else None

    async def stage(self, folder: Path) -> Image:
        self.held = True
        return self.image

    def drop(self, folder: Path) -> None:
        self.dropped.append(folder)


async def test_a_mount_starts_the_copy_and_looks_until_the_slot_is_the_adapters() -> None:
    engine = RecordingEngine(tenantry_begin_mount=0, tenantry_end_mount=(COPYING, COPYING, MOUNTED))
    loading = StagedLoading(engine, OneImage(), 100)  # type: ignore[arg-type]
    loaded = await loading.load(REQUEST, FOLDER)
    assert engine.calls[0] == ("tenantry_begin_mount", (7, 3, 8, ["q"], [1, 2]))
    assert engine.names[1:] == ["tenantry_end_mount"] * 3
    assert (loaded.stage_ms, loaded.bytes_loaded, loaded.true_bytes, loaded.chat_template) == (12.5, 50, 40, "{{ template }}")
    assert (await loading.load(REQUEST, FOLDER)).stage_ms == 0.0


async def test_a_slot_that_differs_from_its_image_is_a_failed_load_and_the_image_is_forgotten() -> None:
    engine = RecordingEngine(tenantry_begin_mount=0, tenantry_end_mount={"state": "failed", "message": "1 of 2 checksums"})
    tier = OneImage()
    with pytest.raises(LoadFailed, match="1 of 2 checksums") as failed:
        await StagedLoading(engine, tier, 100).load(REQUEST, FOLDER)  # type: ignore[arg-type]
    assert failed.value.fields["reason"] == "slot_differs"
    assert tier.dropped == [FOLDER]


async def test_a_release_waits_for_a_mount_that_was_given_up_and_for_the_slot_to_be_zero() -> None:
    engine = RecordingEngine(
        tenantry_begin_release=(COPYING, {"state": "zeroing", "slot": 2}), tenantry_end_release=({"state": "zeroing"}, {"state": "zero"})
    )
    assert await StagedLoading(engine, OneImage(), 100).release(7) == 100  # type: ignore[arg-type]
    assert engine.names == ["tenantry_begin_release"] * 2 + ["tenantry_end_release"] * 2
    assert engine.calls[-1][1] == (2,)


async def test_releasing_what_holds_no_slot_returns_nothing() -> None:
    engine = RecordingEngine(tenantry_begin_release={"state": "absent"})
    assert await StagedLoading(engine, OneImage(), 100).release(7) == 0  # type: ignore[arg-type]


async def test_a_slot_that_is_not_zero_is_not_given_back() -> None:
    engine = RecordingEngine(
        tenantry_begin_release={"state": "zeroing", "slot": 2}, tenantry_end_release={"state": "failed", "message": "the slot is not zero"}
    )
    with pytest.raises(LoadFailed) as failed:
        await StagedLoading(engine, OneImage(), 100).release(7)  # type: ignore[arg-type]
    assert failed.value.fields["reason"] == "slot_not_zeroed"


async def test_zeros_are_mounted_for_every_module_with_sums_of_zero() -> None:
    engine = RecordingEngine(tenantry_begin_mount=0, tenantry_end_mount=MOUNTED)
    assert await StagedLoading(engine, OneImage(), 100).load_zeros(REQUEST)  # type: ignore[arg-type]
    assert engine.calls[0] == ("tenantry_begin_mount", (7, 0, 8, ["q"], [0]))
    assert not await StockLoading(engine, 100).load_zeros(REQUEST)


async def test_the_name_under_which_vllm_keeps_half_of_fused_experts_is_no_module_without_a_place(tmp_path: Path) -> None:
    engine = RecordingEngine(tenantry_adapter_modules=["l.experts"], tenantry_unmatched_modules=["l.experts.base_layer"])
    assert (await StockLoading(engine, 100).load(REQUEST, tmp_path)).modules == ("l.experts",)
    assert "pin_lora" in engine.names


@pytest.mark.parametrize(("matched", "unmatched", "reason"), [([], ["x"], "no_module_matched"), (["q"], ["x"], "unmatched_modules")])
async def test_vllms_own_loading_is_checked_for_what_it_left_out(
    tmp_path: Path, matched: list[str], unmatched: list[str], reason: str
) -> None:
    engine = RecordingEngine(tenantry_adapter_modules=matched, tenantry_unmatched_modules=unmatched)
    with pytest.raises(LoadFailed) as failed:
        await StockLoading(engine, 100).load(REQUEST, tmp_path)
    assert failed.value.fields["reason"] == reason


DENSE = Module(path="l.q_proj", in_features=8, out_features=4)
EXPERTS = tuple(
    Module(path=f"l.experts.{leaf}", in_features=8, out_features=4, experts=2) for leaf in ("gate_proj", "up_proj", "down_proj")
)


def description(layout: str, *modules: Module) -> BaseDescription:
    return BaseDescription(
        identity="b@1", label="b", architecture="A", model_type="a", dtype="float32", experts_layout=layout, modules=modules
    )


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("split", {f"l.experts.{expert}.{leaf}" for expert in (0, 1) for leaf in ("gate_proj", "up_proj", "down_proj")}),
        ("interleaved", {"l.experts", "l.experts.base_layer"}),
    ],
)
def test_modules_are_named_as_normalised_files_name_them(layout: str, names: set[str]) -> None:
    assert set(names_in_files(description(layout, DENSE, *EXPERTS))) == names | {"l.q_proj"}


@pytest.mark.parametrize(
    ("workers", "answer", "images"),
    [(1, {"unsupported": "slots spread over several GPUs"}, 4), (2, {"layout": {}}, 4), (1, {"layout": {}}, 0)],
)
async def test_slots_that_no_image_can_be_made_for_are_loaded_by_vllm_itself(workers: int, answer: dict[str, Any], images: int) -> None:
    engine = RecordingEngine(workers, tenantry_layout=answer)
    loading, tier = await choose_loading(engine, description("none", DENSE), 100, images)
    assert isinstance(loading, StockLoading) and tier is None


async def test_a_host_tier_that_the_engine_cannot_open_is_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Tier:
        path = "/proc/1/fd/3"

        def __init__(self, layout: SlotLayout, images: int) -> None: ...

        async def start(self) -> None: ...

        async def close(self) -> None:
            closed.append("closed")

    monkeypatch.setattr(vllm_loading, "HostTier", Tier)
    layout = {"dtype": "float32", "max_rank": 8, "parts": [], "image_bytes": 0}
    engine = RecordingEngine(tenantry_layout={"layout": layout})
    with pytest.raises(KeyError, match="tenantry_open_host_tier"):
        await choose_loading(engine, description("none", DENSE), 100, 2)
    assert closed == ["closed"]
