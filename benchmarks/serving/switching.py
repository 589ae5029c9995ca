"""What it costs that a request names another adapter than the one before, and what others notice when one is mounted beside them."""

import asyncio
import itertools
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from benchmarks.serving.driver import random_prompts
from benchmarks.serving.figures import percentile

_PROMPT_TOKENS = 64
_SETTLE_S = 0.4
_IDLE_S = 1.5
_STREAM_TOKENS = 1500


class Switching:
    """On Tenantry's engine with every slot taken. `folders` are the adapters' files by their ids; `requests` their LoRARequests."""

    def __init__(self, engine: Any, client: Any, folders: dict[str, Path], rank: int, vocabulary: int, params: Any, delta: Any) -> None:
        self._engine = engine
        self._client = client
        self._folders = folders
        self._rank = rank
        self._vocabulary = vocabulary
        self._params = params
        self._delta = delta
        self._numbers = itertools.count()

    async def first_tokens(self, rounds: int, per_block: int) -> dict[str, dict[str, float]]:
        """Milliseconds to the first token, one request at a time: one adapter repeated, resident ones in turn, staged ones, cold ones.

        Blocks of the first two take turns, so that the machine's moods meet both.
        """
        names = list(self._folders)
        taken: dict[str, list[float]] = {"repeated": [], "alternating": [], "staged": [], "cold": []}
        for number in range(rounds):
            same = names[number % len(names)]
            for mode, order in (("repeated", [same] * per_block), ("alternating", [names[i % len(names)] for i in range(per_block)])):
                await self._first_token_ms(order[-1])  # the block's first request continues what went before
                taken[mode] += [await self._first_token_ms(name) for name in order]
        for mode in ("staged", "cold"):
            for name in names[:3]:
                await self._out(name, is_cold=mode == "cold")
                started_s = time.perf_counter()
                await self._engine.add_adapter(name, self._folders[name], self._rank)
                mounted_ms = (time.perf_counter() - started_s) * 1e3
                taken[mode].append(mounted_ms + await self._first_token_ms(name))
        return compared(taken)

    async def beside_streams(self, streams: int, mounts: int) -> list[dict[str, Any]]:
        """Time between two tokens of other adapters' streams: idle, while one is mounted cold, released, and mounted again."""
        name, *others = self._folders
        gaps: list[tuple[float, float]] = []  # when, ms
        windows: list[dict[str, Any]] = []

        async def during(what: str, work: Awaitable[Any]) -> None:
            begins_s = time.perf_counter()
            await work
            windows.append({"window": what, "begins_s": begins_s, "ends_s": time.perf_counter()})
            await asyncio.sleep(_SETTLE_S)

        async def scenario() -> None:
            await self._out(name, is_cold=True)
            await asyncio.sleep(_SETTLE_S)
            await during("idle", asyncio.sleep(_IDLE_S))
            for _ in range(mounts):
                await during("cold mount with its proof", self._engine.add_adapter(name, self._folders[name], self._rank))
                await during("release", self._out(name, is_cold=False))
                await during("mount from the host tier", self._engine.add_adapter(name, self._folders[name], self._rank))
                await self._out(name, is_cold=True)
                await asyncio.sleep(_SETTLE_S)
            await during("idle", asyncio.sleep(_IDLE_S))
            await self._engine.add_adapter(name, self._folders[name], self._rank)

        prompts = random_prompts(streams, _PROMPT_TOKENS, self._vocabulary, "streams")
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._stream(others[n % len(others)], prompt, gaps)) for n, prompt in enumerate(prompts)]
            await scenario()
            for task in running:
                task.cancel()
        return seen_in(gaps, windows)

    async def _out(self, name: str, *, is_cold: bool) -> None:
        await self._engine.remove_adapter(name)
        if is_cold:
            self._engine._tier.drop(self._folders[name])
        else:
            await self._engine._tier.stage(self._folders[name])

    async def _first_token_ms(self, name: str) -> float:
        number = next(self._numbers)
        prompt = random_prompts(1, _PROMPT_TOKENS, self._vocabulary, f"switch-{number}")[0]
        started_s = time.perf_counter()
        async for _ in self._generate(name, prompt, 1, f"switch-{number}"):
            pass
        return (time.perf_counter() - started_s) * 1e3

    async def _stream(self, name: str, prompt: list[int], gaps: list[tuple[float, float]]) -> None:
        """Until cancelled: one that is through begins anew."""
        while True:
            last_s = 0.0
            async for _ in self._generate(name, prompt, _STREAM_TOKENS, f"stream-{next(self._numbers)}"):
                now_s = time.perf_counter()
                if last_s:
                    gaps.append((now_s, (now_s - last_s) * 1e3))
                last_s = now_s

    def _generate(self, name: str, prompt: list[int], tokens: int, request_id: str) -> Any:
        params = self._params(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=self._delta)
        request = self._engine._loaded()._requests[name]
        return self._client.generate({"prompt_token_ids": prompt}, params, request_id, lora_request=request)


def compared(taken: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """p50 and p99 of each order, and what they are more than those of one adapter repeated."""
    found: dict[str, dict[str, float]] = {}
    for mode, values in taken.items():
        p50, p99 = percentile(values, 0.5), percentile(values, 0.99)
        found[mode] = {"ttft_p50_ms": round(p50, 3), "ttft_p99_ms": round(p99, 3), "requests": len(values)}
        if mode != "repeated":
            repeated = taken["repeated"]
            found[mode]["extra_p50_ms"] = round(p50 - percentile(repeated, 0.5), 3)
            found[mode]["extra_p99_ms"] = round(p99 - percentile(repeated, 0.99), 3)
    return found


def seen_in(gaps: list[tuple[float, float]], windows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By kind of window: how long it lasted, and the gaps that ended in it (or right after it, having begun in it)."""
    by_kind: dict[str, dict[str, Any]] = {}
    for window in windows:
        kind = by_kind.setdefault(window["window"], {"lasts_ms": [], "gaps": []})
        kind["lasts_ms"].append((window["ends_s"] - window["begins_s"]) * 1e3)
        kind["gaps"] += [gap for when_s, gap in gaps if window["begins_s"] <= when_s <= window["ends_s"] + gap / 1e3]
    rows: list[dict[str, Any]] = []
    for name, kind in by_kind.items():
        row: dict[str, Any] = {"window": name, "lasts_ms": [round(lasts, 1) for lasts in kind["lasts_ms"]], "gaps": len(kind["gaps"])}
        if kind["gaps"]:
            row |= {f"itl_p{int(share * 100)}_ms": round(percentile(kind["gaps"], share), 3) for share in (0.5, 0.99)}
            row["itl_longest_ms"] = round(max(kind["gaps"]), 3)
        rows.append(row)
    idle = next((row for row in rows if row["window"] == "idle" and "itl_p99_ms" in row), None)
    for row in rows:
        if idle is not None and "itl_p99_ms" in row:
            row["p99_times_idle"] = round(row["itl_p99_ms"] / idle["itl_p99_ms"], 3)
    return rows
