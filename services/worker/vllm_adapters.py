"""Adapters in a vLLM engine: loaded before any request can name them, proven to change the answer, released with their slot zeroed."""

import asyncio
import itertools
import math
import time
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from services.worker.chat_templates import ChatTemplates
from services.worker.engine import LoadProof, ReleaseProof
from services.worker.vllm_loading import CALL_LIMIT_S, Loading, in_worker
from services.worker.vllm_setup import VllmModules, available_bytes
from shared.contracts.workers import SlotMemory
from shared.errors import EngineError, LoadFailed

log = structlog.get_logger()

PROBE_TOKENS = 16  # generated, from a prompt of one: steps like any other of a running batch, none held up by a prompt
_WARM_NAME, _WARM_ID = "tenantry-warm-up", 1_000_000
_WARM_TOGETHER = 8
_WARM_PROMPT_TOKENS = 48
LEAST_DIFFERENCE = 1e-6
NOISE_FACTOR = 4.0  # batches of other sizes round differently: what two probes of the base differ by is not an effect

LogProbabilities = list[dict[int, float]]


def probe_prompt(vocabulary: int, tokens: int) -> list[int]:
    """Token ids spread over the vocabulary, always the same."""
    return [(7919 * index + 13) % vocabulary for index in range(1, tokens + 1)]


def largest_difference(left: LogProbabilities, right: LogProbabilities) -> float:
    """Between the log-probabilities of the likeliest tokens, position by position, up to the first where the answers part: what follows
    there follows other words. A token that one side does not list is at most as likely there as the last it lists. NaN is infinite."""
    largest = 0.0
    for mine, theirs in zip(left, right, strict=True):
        if any(math.isnan(value) for value in (*mine.values(), *theirs.values())):
            return math.inf
        mine_last, theirs_last = min(mine.values()), min(theirs.values())
        for token in mine.keys() | theirs.keys():
            here, there = mine.get(token), theirs.get(token)
            if here is None or there is None:
                difference = (here - theirs_last) if here is not None else (theirs[token] - mine_last)
            else:
                difference = abs(here - there)
            largest = max(largest, difference)
        if max(mine, key=mine.__getitem__) != max(theirs, key=theirs.__getitem__):
            break
    return largest


class LoadedAdapters:
    """`requests` is what the application may name: vLLM's own table of names, shared with it."""

    def __init__(
        self,
        vllm: VllmModules,
        engine: Any,
        requests: MutableMapping[str, Any],
        loading: Loading,
        slots: Mapping[str, Any],
        vocabulary: int,
        max_model_len: int,
    ) -> None:
        self.templates = ChatTemplates()
        self._vllm = vllm
        self._engine = engine
        self._requests = requests
        self._loading = loading
        self._max_rank: int = slots["max_rank"]
        self._slots = len(slots["slots"])
        self._slot_bytes: int = slots["slot_bytes"]
        self._vocabulary = vocabulary
        self._most_tokens = max_model_len - 1
        self._ids: dict[int, str] = {}  # every id ever given out; none is used twice
        self._proofs: dict[str, LoadProof] = {}
        self._changing = asyncio.Lock()
        self._probe_numbers = itertools.count()
        self._reference: LogProbabilities | None = None  # the base's answer to the probe, alone

    async def warm(self) -> float:
        """Probes alone and several at once, with an adapter of zeros and without; the seconds it took.

        What is compiled only when it is first needed (kernels, the sampler's log-probabilities) would hold up every tenant's tokens at
        the first mount or the first mixed batch.
        """
        started_s = time.monotonic()
        await in_worker(self._engine, "tenantry_warm_up")
        self._reference = await self._probe(None)
        request = self._vllm.lora_request(lora_name=_WARM_NAME, lora_int_id=_WARM_ID, lora_path=f"/{_WARM_NAME}")
        if await self._loading.load_zeros(request):
            try:
                await self._probe(request)
                for prompt_tokens in (1, _WARM_PROMPT_TOKENS):
                    async with asyncio.TaskGroup() as group:
                        for number in range(_WARM_TOGETHER):
                            group.create_task(self._probe(request if number % 2 else None, prompt_tokens))
            finally:
                await self._loading.release(_WARM_ID)
        return time.monotonic() - started_s

    async def add(self, adapter_id: str, folder: Path, rank: int) -> LoadProof:
        """As Engine.add_adapter; repeated for one that is there, its first proof."""
        async with self._changing:
            if adapter_id in self._proofs:
                return self._proofs[adapter_id]
            try:
                await self._check_room(rank)
            except LoadFailed:
                raise
            except Exception as error:
                raise self._failure(error) from error
            int_id = len(self._ids) + 1
            self._ids[int_id] = adapter_id
            started_s = time.monotonic()
            try:
                async with asyncio.timeout(CALL_LIMIT_S):
                    request = self._vllm.lora_request(lora_name=adapter_id, lora_int_id=int_id, lora_path=str(folder))
                    proof, chat_template = await self._load(request, folder, started_s)
                    if chat_template is not None:
                        await self.templates.add(adapter_id, chat_template)
            except (LoadFailed, asyncio.CancelledError):
                await self._discard(int_id)
                raise
            except Exception as error:
                await self._discard(int_id)
                raise self._failure(error) from error
            self._proofs[adapter_id] = proof
            self._requests[adapter_id] = request
            return proof

    async def remove(self, adapter_id: str) -> ReleaseProof:
        """As Engine.remove_adapter; for one that is not there, nothing returned."""
        async with self._changing:
            free_before = available_bytes()
            self._requests.pop(adapter_id, None)
            self._proofs.pop(adapter_id, None)
            await self.templates.remove(adapter_id)
            try:
                async with asyncio.timeout(CALL_LIMIT_S):
                    listed = await self._engine.list_loras()
                    returned = sum([await self._loading.release(int_id) for int_id in listed if self._name(int_id) == adapter_id])
                    left = await self._names()
            except LoadFailed:
                raise
            except Exception as error:
                raise self._failure(error) from error
            if adapter_id in left:
                raise LoadFailed("the engine still lists the adapter after its removal", reason="not_removed", adapter_id=adapter_id)
            return ReleaseProof(
                slot_bytes_returned=returned,
                device_free_bytes_before=free_before,
                device_free_bytes_after=available_bytes(),
            )

    def bytes_of(self, int_id: int) -> int:
        """Of the adapter with the engine's number."""
        proof = self._proofs.get(self._name(int_id))
        return proof.true_bytes or self._slot_bytes if proof is not None else self._slot_bytes

    def slots(self, held: Sequence[int | None]) -> tuple[SlotMemory, ...]:
        """What the engine's slots hold, from its own list of ids."""
        found: list[SlotMemory] = []
        for index, int_id in enumerate(held):
            adapter_id = self._name(int_id) if int_id is not None else ""
            proof = self._proofs.get(adapter_id)
            true_bytes = proof.true_bytes if proof is not None else 0
            found.append(SlotMemory(index=index, adapter_id=adapter_id, reserved_bytes=self._slot_bytes, true_bytes=true_bytes))
        return tuple(found)

    async def names(self) -> frozenset[str]:
        """The engine's own list.

        :raises EngineError: it does not answer.
        """
        try:
            async with asyncio.timeout(CALL_LIMIT_S):
                return await self._names()
        except Exception as error:
            raise EngineError(f"the engine does not say which adapters it holds ({type(error).__name__})") from error

    async def _names(self) -> frozenset[str]:
        return frozenset(map(self._name, await self._engine.list_loras()))

    def _name(self, int_id: int) -> str:
        return self._ids.get(int_id, f"unknown_{int_id}")

    async def _check_room(self, rank: int) -> None:
        if rank > self._max_rank:
            raise LoadFailed(
                f"rank {rank} is over this engine's {self._max_rank}", reason="rank_too_big", asked=rank, allowed=self._max_rank
            )
        held = len(await self._names())
        if held >= self._slots:
            raise LoadFailed(
                f"all {self._slots} slots are taken", reason="no_free_slot", asked_slots=1, held_slots=held, limit_slots=self._slots
            )

    async def _load(self, request: Any, folder: Path, started_s: float) -> tuple[LoadProof, str | None]:
        loaded = await self._loading.load(request, folder)
        difference = loaded.image.probe_difference if loaded.image is not None else None
        if difference is None:
            difference = await self._proven_difference(request)
        if loaded.image is not None:
            loaded.image.probe_difference = difference
        proof = LoadProof(
            modules_matched=len(loaded.modules),
            probe_difference=difference,
            load_ms=(time.monotonic() - started_s) * 1000.0,
            bytes_loaded=loaded.bytes_loaded,
            stage_ms=loaded.stage_ms,
            mount_ms=loaded.mount_ms,
            true_bytes=loaded.true_bytes,
        )
        return proof, loaded.chat_template

    async def _proven_difference(self, request: Any) -> float:
        """Adapter and base are probed together, in the same steps; what the base's answer differs by from an earlier one is noise.

        :raises LoadFailed: the adapter changes nothing, or answers with what is no number.
        """
        reference = self._reference or await self._probe(None)
        try:
            async with asyncio.TaskGroup() as group:
                of_base, of_adapter = group.create_task(self._probe(None)), group.create_task(self._probe(request))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        base = of_base.result()
        difference, noise = largest_difference(base, of_adapter.result()), largest_difference(base, reference)
        if difference == math.inf:
            raise LoadFailed("the adapter's answers are not numbers", reason="not_finite")
        if difference <= max(LEAST_DIFFERENCE, NOISE_FACTOR * noise):
            raise LoadFailed(
                f"the adapter changes nothing: log-probabilities differ by {difference:.2g} from the base's (noise {noise:.2g})",
                reason="no_effect",
                probe_difference=difference,
            )
        return difference

    async def _probe(self, request: Any, prompt_tokens: int = 1) -> LogProbabilities:
        """Log-probabilities of the tokens that greedily follow the probe's prompt. The platform's own: past the governor, and with a salt
        that no tenant has."""
        ids = probe_prompt(self._vocabulary, min(prompt_tokens, self._most_tokens - 1))
        tokens = min(PROBE_TOKENS, self._most_tokens - len(ids))
        params = self._vllm.sampling_params(max_tokens=tokens, temperature=0.0, logprobs=5, ignore_eos=True, detokenize=False)
        prompt = {"type": "token", "prompt_token_ids": ids, "cache_salt": "tenantry-probe"}
        last: Any = None
        async for output in self._engine.generate(prompt, params, f"probe-{next(self._probe_numbers)}", lora_request=request):
            last = output
        if last is None or not last.outputs or not last.outputs[0].logprobs:
            raise LoadFailed("the engine gave no answer to the probe", reason="probe_failed")
        return [{token: entry.logprob for token, entry in row.items()} for row in last.outputs[0].logprobs]

    async def _discard(self, int_id: int) -> None:
        """After a failed load: vLLM keeps the id of an adapter that it could not activate, and would serve half of it."""
        try:
            async with asyncio.timeout(CALL_LIMIT_S):
                await asyncio.shield(self._loading.release(int_id))
        except Exception as error:  # noqa: BLE001  the load's own error is the one to report
            log.error("adapter.discard_failed", cause=type(error).__name__)

    def _failure(self, error: Exception) -> LoadFailed:
        if self._engine.errored:
            return LoadFailed("the engine is dead", reason="engine_dead")
        if isinstance(error, TimeoutError):
            return LoadFailed(f"the engine did not answer within {CALL_LIMIT_S:.0f} s", reason="timeout")
        words = str(error).strip().splitlines() or [type(error).__name__]
        return LoadFailed(f"the engine refused the adapter: {words[-1]}", reason="refused_by_engine")
