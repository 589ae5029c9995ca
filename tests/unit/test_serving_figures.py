"""The serving benchmark's arithmetic, and the files that it serves: from known arrivals and small shapes, without an engine."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.serving import adapter_files, engines, figures, gpu_time, model_files, report, shapes, switching, whole_path
from benchmarks.serving.driver import Driver, random_prompts
from benchmarks.serving.figures import Stream
from benchmarks.serving.results import Results
from shared.artifacts.archive import read_bundle
from shared.artifacts.base_model import describe_base
from shared.artifacts.validate import validate
from shared.contracts.base import EngineLimits

SMALL = {"hidden_size": 64, "vocab_size": 128, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL_CONFIGS = {
    "gptoss-20b": SMALL | {"intermediate_size": 64, "num_local_experts": 4},
    "qwen3-30b-a3b": SMALL | {"moe_intermediate_size": 32, "num_experts": 4},
}


def stream(sent_s: float, *arrivals: tuple[float, int]) -> Stream:
    return Stream(sent_s=sent_s, arrivals=list(arrivals))


def row(system: str, batch: int = 8, **found: float) -> dict[str, Any]:
    return {"model": "gptoss-20b", "system": system, "batch": batch, **found}


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.01, 1.0), (0.5, 2.0), (0.51, 3.0), (0.75, 3.0), (0.99, 4.0), (1.0, 4.0)])
def test_a_percentile_is_the_smallest_value_that_the_share_does_not_exceed(share: float, expected: float) -> None:
    assert figures.percentile([4.0, 2.0, 1.0, 3.0], share) == expected


def test_time_between_tokens_is_taken_only_while_the_whole_batch_decodes() -> None:
    early = stream(0.0, (0.1, 1), (0.4, 1), (0.5, 1), (0.51, 1), (0.52, 1), (0.53, 1))
    late = stream(0.0, (0.5, 1), (0.51, 1), (0.52, 1), (0.53, 1), (0.9, 1))
    found = figures.of_batch([early, late])
    assert found["itl_ms"] == pytest.approx(10.0), "the steps in which the late prompt was read, and those without the early one, count"
    assert found["ttft_ms"] == pytest.approx(300.0)
    assert found["ttft_last_ms"] == pytest.approx(500.0)
    assert found["otps_all"] == pytest.approx(11 / 0.9)


def test_tokens_that_come_together_share_their_time() -> None:
    found = figures.of_batch([stream(0.0, (0.1, 1), (0.12, 2), (0.13, 1))])
    assert found["itl_ms"] == pytest.approx(10.0)
    assert found["otps"] == pytest.approx(3 / 0.03)


def test_one_token_each_gives_no_time_between_tokens() -> None:
    assert figures.of_batch([stream(0.0, (0.1, 1)), stream(0.0, (0.3, 1))]) == pytest.approx({"ttft_ms": 200.0, "ttft_last_ms": 300.0})


def test_what_is_kept_is_told_beside_its_bar_for_tenantry_alone() -> None:
    rows = [
        row("vllm", itl_ms=5.0, prefill_gpu_ms=160.0),
        row("vllm+8", itl_ms=10.0),
        row("tenantry-engine+8", itl_ms=5.5, prefill_gpu_ms=184.0),
    ]
    stock, ours = figures.kept([*rows, row("tenantry-engine+8", batch=1, itl_ms=3.0)])
    assert stock == {"model": "gptoss-20b", "system": "vllm+8", "batch": 8, "decode_kept": 0.5}
    assert (ours["decode_kept"], ours["decode_bar"]) == (0.9091, 0.88)
    assert (ours["prefill_kept"], ours["prefill_bar"]) == (0.8696, 0.85)


def test_arrivals_come_at_the_rate_that_was_asked_whatever_the_seed() -> None:
    for seed in ("a", "b", "c"):
        times = whole_path.poisson(50.0, 100.0, seed)
        assert times == sorted(times)
        assert 0.0 < times[0] < times[-1] < 100.0
        assert len(times) == pytest.approx(5000, rel=0.05)


def test_a_request_that_came_late_has_waited_since_it_was_due() -> None:
    streams = [stream(1.0, (1.1, 1), (1.2, 2)), stream(2.0, (4.0, 1), (4.4, 2))]
    found = figures.of_arrivals(streams, 0.5)
    assert found["ttft_p99_ms"] == pytest.approx(2000.0)
    assert found["itl_p50_ms"] == pytest.approx(50.0)
    assert found["otps_all"] == pytest.approx(6 / 3.4)
    assert found["requests"] == 2


def test_the_whole_path_is_told_beside_the_engine_in_it() -> None:
    rows = [row("vllm", itl_ms=5.0), row("tenantry-engine+8", otps=170.0, ttft_ms=160.0), row("tenantry+8", otps=168.3, ttft_ms=162.5)]
    engine, path = figures.kept(rows)
    assert "otps_of_engine" not in engine
    assert (path["otps_of_engine"], path["ttft_added_ms"]) == (0.99, 2.5)


def test_a_switch_costs_what_it_takes_more_than_repeating() -> None:
    found = switching.compared({"repeated": [10.0, 12.0], "alternating": [10.5, 13.0], "cold": [500.0]})
    assert found["alternating"] == {"ttft_p50_ms": 10.5, "ttft_p99_ms": 13.0, "requests": 2, "extra_p50_ms": 0.5, "extra_p99_ms": 1.0}
    assert found["cold"]["extra_p50_ms"] == 490.0
    assert "extra_p50_ms" not in found["repeated"]


def test_a_stall_that_begins_in_a_window_counts_in_it_though_it_ends_later() -> None:
    idle = {"window": "idle", "begins_s": 0.0, "ends_s": 1.0}
    mounts = [{"window": "mount", "begins_s": 2.0, "ends_s": 2.1}, {"window": "mount", "begins_s": 3.0, "ends_s": 3.2}]
    gaps = [(0.5, 4.0), (0.6, 5.0), (1.5, 90.0), (2.05, 6.0), (2.3, 250.0), (3.1, 7.0), (3.5, 8.0)]
    rows = {row["window"]: row for row in switching.seen_in(gaps, [idle, *mounts])}
    assert (rows["idle"]["gaps"], rows["idle"]["itl_p99_ms"]) == (2, 5.0)
    assert (rows["mount"]["gaps"], rows["mount"]["itl_longest_ms"]) == (3, 250.0)
    assert rows["mount"]["lasts_ms"] == [100.0, 200.0]
    assert rows["mount"]["p99_times_idle"] == 50.0


def test_kernels_side_by_side_keep_the_gpu_busy_once() -> None:
    events = [("a", 0, 3_000_000), ("b", 1_000_000, 1_000_000), ("a", 2_000_000, 2_000_000), ("a", 10_000_000, 1_000_000)]
    assert gpu_time.busy_ms(events) == pytest.approx(5.0)
    assert gpu_time.by_kernel(events) == [("a", 3, 6.0), ("b", 1, 1.0)]


def test_the_result_file_is_whole_after_every_row_and_keeps_the_other_model(tmp_path: Path) -> None:
    path = tmp_path / "serving.json"
    Results(path, {"date": "d1"}).row("qwen3-30b-a3b", "vllm", 1, {"itl_ms": 4.0})
    results = Results(path, {"date": "d2"})
    results.row("gptoss-20b", "vllm", 1, {"itl_ms": 3.0})
    results.row("gptoss-20b", "tenantry-engine+8", 1, {"itl_ms": 4.0})
    results.row("gptoss-20b", "tenantry-engine+8", 1, {"prefill_gpu_ms": 28.0})
    found = json.loads(path.read_text())
    assert [(r["model"], r["system"], r["batch"]) for r in found["rows"]] == [
        ("qwen3-30b-a3b", "vllm", 1),
        ("gptoss-20b", "vllm", 1),
        ("gptoss-20b", "tenantry-engine+8", 1),
    ]
    assert found["rows"][2] == row("tenantry-engine+8", batch=1, itl_ms=4.0, prefill_gpu_ms=28.0)
    assert [share["decode_kept"] for share in found["kept"]] == [0.75]
    assert (found["runs"]["qwen3-30b-a3b"]["date"], found["runs"]["gptoss-20b"]["date"]) == ("d1", "d2")


@pytest.mark.parametrize("model", SMALL_CONFIGS)
def test_adapters_of_every_model_pass_validation_on_its_base(model: str, tmp_path: Path) -> None:
    config = shapes.config_of(model, 2) | SMALL_CONFIGS[model]
    folder = model_files.write_model(tmp_path / "base", config, 1)
    base = describe_base(folder, model, "bfloat16", model_files.hash_cache(folder))
    limits = EngineLimits(slots=8, max_rank=8, bytes_per_rank=1)
    digests: set[str] = set()
    for seed in (1, 2):
        adapter = adapter_files.write_adapter(tmp_path / str(seed), config, 8, seed, model)
        valid = validate(read_bundle(adapter, tmp_path / f"work-{seed}"), base, limits)
        assert (valid.rank, valid.modules) == (8, 2 * (4 + 3 * 4))
        digests.add(valid.digest)
    assert len(digests) == 2


def test_a_random_bases_identity_follows_its_seed_and_its_configuration(tmp_path: Path) -> None:
    config = shapes.config_of("tiny")
    wider = config | {"num_experts_per_tok": 4}

    def identity(name: str, config: dict[str, Any], seed: int) -> str:
        folder = model_files.write_model(tmp_path / name, config, seed)
        return describe_base(folder, "tiny", "bfloat16", model_files.hash_cache(folder)).identity

    found = [identity("one", config, 1), identity("again", config, 1), identity("seed", config, 2), identity("wider", wider, 1)]
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_full_sizes_are_the_published_ones() -> None:
    adapter = {model: sum(a * b for _, (a, b) in shapes.adapter_tensors(shapes.config_of(model), 32)) * 2 for model in SMALL_CONFIGS}
    assert adapter == {"gptoss-20b": 739_639_296, "qwen3-30b-a3b": 3_375_366_144}


def test_both_engines_get_the_same_arguments_of_vllm() -> None:
    plan = engines.Plan(model="tiny", folder="f", adapters="a")
    alone, ours = engines.engine_args(plan, tenantry=False), engines.engine_args(plan, tenantry=True)
    assert {name for name in alone if alone[name] != ours[name]} == {"worker_extension_cls"}


def test_prompts_are_random_ids_of_the_vocabulary_and_the_same_for_the_same_seed() -> None:
    prompts = random_prompts(3, 50, 2048, "1-1")
    assert prompts == random_prompts(3, 50, 2048, "1-1")
    assert prompts != random_prompts(3, 50, 2048, "1-2")
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert all(0 <= token < 2048 for prompt in prompts for token in prompt)


class Params:
    def __init__(self, **fields: Any) -> None:
        self.fields = fields


class Sample:
    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids


class Output:
    def __init__(self, token_ids: list[int]) -> None:
        self.outputs = [Sample(token_ids)]


class CountingEngine:
    """Answers with `short` tokens less than asked, two in each step; keeps who asked for which adapter."""

    def __init__(self, short: int = 0) -> None:
        self.short = short
        self.asked: list[Any] = []

    async def generate(self, prompt: dict[str, Any], params: Params, request_id: str, lora_request: Any) -> Any:
        self.asked.append((lora_request, len(prompt["prompt_token_ids"]), request_id))
        left = params.fields["max_tokens"] - self.short
        while left > 0:
            yield Output([7] * min(2, left))
            left -= 2


async def test_requests_take_the_adapters_in_turn_and_every_token_is_counted() -> None:
    engine = CountingEngine()
    streams = await Driver(engine, Params, "delta", 2048, ["x", "y"]).batch(3, 5, 9, "seed")
    assert [asked[:2] for asked in engine.asked] == [("x", 5), ("y", 5), ("x", 5)]
    assert len({request_id for *_, request_id in engine.asked}) == 3
    assert [stream.tokens for stream in streams] == [9, 9, 9]


async def test_an_answer_of_another_length_than_asked_is_no_figure() -> None:
    with pytest.raises(ExceptionGroup) as failed:
        await Driver(CountingEngine(short=1), Params, "delta", 2048).batch(1, 5, 9, "seed")
    assert "8 tokens came, 9 were asked for" in str(failed.value.exceptions[0])


FOUND = {
    "rows": [
        row("tenantry-engine+8", batch=1, ttft_ms=46.25, itl_ms=3.2, otps=312.5, otps_all=300.0, prefill_gpu_ms=28.0),
        row("vllm", batch=1, ttft_ms=45.0, itl_ms=3.0, otps=333.0, otps_all=320.0, prefill_gpu_ms=24.5),
        row("vllm", batch=8, ttft_ms=150.0, itl_ms=5.0, otps=200.0, otps_all=1500.0),
    ],
    "runs": {
        "gptoss-20b": {
            "systems": {
                "tenantry-engine+8": {
                    "switching": {
                        "beside_8_streams": [
                            {"window": "idle", "lasts_ms": [1500.0, 1501.0], "gaps": 9, "itl_p50_ms": 5.0, "itl_p99_ms": 6.0}
                        ],
                        "first_token": {"repeated": {"ttft_p50_ms": 20.0, "ttft_p99_ms": 22.0, "requests": 64}},
                    }
                }
            }
        }
    },
}


def test_tables_are_written_between_their_marks_with_what_is_kept_and_asked() -> None:
    page = "before\n<!-- figures: serving -->\nold\n<!-- end -->\nafter\n<!-- figures: switching -->\n<!-- end -->\n"
    text = report.write_tables(page, FOUND)
    lines = text.splitlines()
    assert lines[0] == "before" and "old" not in lines
    assert lines[4] == "| GPT-OSS-20B, 1 | vLLM, no adapters | 45.0 | 3.00 | 333, 320 | 24.5 |"
    assert (
        lines[5] == "| GPT-OSS-20B, 1 | Tenantry's engine, 8 adapters | 46.2 | 3.20 (94%, asked 88%) | 312, 300 | 28.0 (88%, asked 85%) |"
    )
    assert lines[6] == "| GPT-OSS-20B, 8 | vLLM, no adapters | 150.0 | 5.00 | 200, 1,500 | – |"
    assert "| idle | 1,500, 1,501 | 5.00 | 6.00 | – | – |" in lines
    assert "| repeated | 64 | 20.00 | 22.00 | – | – |" in lines
    assert report.write_tables(text, FOUND) == text, "written twice it stays as it is"


def test_the_plot_has_a_bar_for_every_row_as_high_as_its_speed() -> None:
    drawn = ElementTree.fromstring(report.plot(FOUND))
    heights = sorted(float(bar.get("height", "0")) for bar in drawn if bar.tag.endswith("rect") and bar.get("width") == "22")
    assert [height / heights[-1] for height in heights] == pytest.approx([0.0, 200 / 333, 312.5 / 333, 1.0], abs=0.01)
