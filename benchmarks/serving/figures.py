"""From when tokens came to the figures of a row. Pure."""

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

SYSTEMS = {"a": "vllm", "b": "vllm+8", "c": "tenantry-engine+8", "d": "tenantry+8"}
OVER_HTTP = {"a": "vllm-serve", "b": "vllm-serve+8"}
BARS = {
    ("gptoss-20b", "decode"): {1: 0.88, 8: 0.88, 32: 0.83},
    ("qwen3-30b-a3b", "decode"): {1: 0.86, 8: 0.88, 32: 0.85},
    ("gptoss-20b", "prefill"): {1: 0.85, 8: 0.85, 32: 0.85},
    ("qwen3-30b-a3b", "prefill"): {1: 0.80, 8: 0.80, 32: 0.80},
}
"""Share of the speed without adapters that is to be kept with eight."""


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """One request: when it was sent, and when how many tokens came (clock of the process that took them)."""

    sent_s: float
    arrivals: list[tuple[float, int]]

    @property
    def first_s(self) -> float:
        return self.arrivals[0][0]

    @property
    def last_s(self) -> float:
        return self.arrivals[-1][0]

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.arrivals)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * share // 1).__int__() - 1)]


def of_batch(streams: Sequence[Stream]) -> dict[str, float]:
    """Of one batch sent at once. `itl_ms` is taken while all of them decode: from the last first token to the first last one.

    otps: tokens per second of a request after its first token. otps_all: of all together, prompts included.
    """
    ttfts = [(stream.first_s - stream.sent_s) * 1e3 for stream in streams]
    found = {"ttft_ms": statistics.median(ttfts), "ttft_last_ms": max(ttfts)}
    if all(stream.last_s > stream.first_s for stream in streams):
        begins_s, ends_s = max(stream.first_s for stream in streams), min(stream.last_s for stream in streams)
        gaps_ms = [gap for stream in streams for gap in _gaps_ms(stream, begins_s, ends_s)]
        if gaps_ms:
            found |= {"itl_ms": statistics.fmean(gaps_ms), "itl_p99_ms": percentile(gaps_ms, 0.99)}
        found["otps"] = statistics.median((s.tokens - s.arrivals[0][1]) / (s.last_s - s.first_s) for s in streams)
        spent_s = max(stream.last_s for stream in streams) - min(stream.sent_s for stream in streams)
        found["otps_all"] = sum(stream.tokens for stream in streams) / spent_s
    return found


def of_arrivals(streams: Sequence[Stream], rate: float) -> dict[str, float]:
    """Of requests that came at their own times: times to the first token, and each request's mean time between tokens."""
    ttfts = [(stream.first_s - stream.sent_s) * 1e3 for stream in streams]
    itls = [(stream.last_s - stream.first_s) * 1e3 / (stream.tokens - stream.arrivals[0][1]) for stream in streams]
    spent_s = max(stream.last_s for stream in streams) - min(stream.sent_s for stream in streams)
    return {
        "rate": rate,
        "requests": len(streams),
        "ttft_p50_ms": percentile(ttfts, 0.5),
        "ttft_p99_ms": percentile(ttfts, 0.99),
        "itl_p50_ms": percentile(itls, 0.5),
        "itl_p99_ms": percentile(itls, 0.99),
        "otps_all": sum(stream.tokens for stream in streams) / spent_s,
    }


def _gaps_ms(stream: Stream, begins_s: float, ends_s: float) -> list[float]:
    """Per token; tokens that came together share the time."""
    gaps: list[float] = []
    for (before_s, _), (now_s, tokens) in zip(stream.arrivals, stream.arrivals[1:], strict=False):
        if before_s >= begins_s and now_s <= ends_s:
            gaps += [(now_s - before_s) * 1e3 / tokens] * tokens
    return gaps


def medians(repeats: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(repeat[name] for repeat in repeats), 4) for name in repeats[0]}


def kept(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every row that has a row of the base alone beside it: what share of its speed is left, and the bar for Tenantry's engine.

    Of the whole path also what it takes from the engine's speed and adds to its first token.
    """
    base = {(row["model"], row["batch"]): row for row in rows if row["system"] == "vllm"}
    engine = {(row["model"], row["batch"]): row for row in rows if row["system"] == SYSTEMS["c"]}
    shares: list[dict[str, Any]] = []
    for row in rows:
        alone = base.get((row["model"], row["batch"]))
        if alone is None or row["system"] == "vllm":
            continue
        found: dict[str, Any] = {"model": row["model"], "system": row["system"], "batch": row["batch"]}
        for phase, name in (("decode", "itl_ms"), ("prefill", "prefill_gpu_ms"), ("ttft", "ttft_ms")):
            if row.get(name) and alone.get(name):
                found[f"{phase}_kept"] = round(alone[name] / row[name], 4)
                bar = BARS.get((row["model"], phase), {}).get(row["batch"])
                if bar is not None and row["system"].startswith("tenantry"):
                    found[f"{phase}_bar"] = bar
        inner = engine.get((row["model"], row["batch"]))
        if row["system"] == SYSTEMS["d"] and inner is not None:
            found["otps_of_engine"] = round(row["otps"] / inner["otps"], 4)
            found["ttft_added_ms"] = round(row["ttft_ms"] - inner["ttft_ms"], 3)
        shares.append(found)
    return shares
