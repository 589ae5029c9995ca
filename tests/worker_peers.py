"""The worker's peers for its tests, on real NATS: a router that keeps every frame, and a registry that keeps one pool's entry."""

import asyncio
import hashlib
import io
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from ulid import ULID

from services.worker.governor import Governor
from services.worker.scripted_engine import ScriptedEngine, ScriptedSettings
from services.worker.settings import EngineKind, WorkerSettings
from services.worker.worker import Worker
from shared.bus import Bucket, Bus, BusSettings, Message, Objects, connect, ensure_stream, open_bucket, open_objects, publish_durable
from shared.bus.embedded import EmbeddedNats
from shared.contracts import adapters, admin, inference, state, usage, workers
from shared.contracts.adapters import AdapterDrained, AdapterFailed, AdapterLoaded, DrainOrder, Mount, PoolEntry, PoolWorker
from shared.contracts.inference import Ack, Cancel, Frame, FrameKind, Handle, InferRequest, Resend
from shared.contracts.tenancy import Share, TenantLimits, TenantShares, shares_key
from shared.contracts.tenancy import encode as encode_shares
from shared.contracts.workers import HelloAccepted, WorkerHello
from shared.errors import Conflict
from shared.policy.lifecycle import AdapterState
from shared.runtime import Stop

POOL = "main"


async def eventually(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """The first true value of `condition()`."""
    async with asyncio.timeout(timeout_s):
        while not (value := condition()):
            await asyncio.sleep(0.005)
    return value


class Answer:
    """What came for one attempt, in order of seq, doubles left out and counted."""

    def __init__(self) -> None:
        self.frames: dict[int, Frame] = {}
        self.doubles = 0
        self.progress = 0

    @property
    def kinds(self) -> list[FrameKind]:
        return [self.frames[seq].kind for seq in sorted(self.frames)]

    @property
    def whole(self) -> bool:
        """No gap, and an end."""
        return bool(self.frames) and sorted(self.frames) == list(range(len(self.frames))) and self.last is not None

    @property
    def last(self) -> Frame | None:
        frame = self.frames[max(self.frames)] if self.frames else None
        return frame if frame is not None and frame.kind in (FrameKind.BOUNCED, FrameKind.END, FrameKind.ERROR) else None

    @property
    def body(self) -> bytes:
        return b"".join(self.frames[seq].data for seq in sorted(self.frames) if self.frames[seq].kind is FrameKind.BODY)

    @property
    def text(self) -> str:
        """The generated text of a streamed chat."""
        said: list[str] = []
        for line in self.body.decode().split("\n\n"):
            if line.startswith("data: {"):
                for choice in msgspec.json.decode(line[6:])["choices"]:
                    said.append(choice["delta"].get("content", ""))
        return "".join(said)

    @property
    def error(self) -> str:
        """The code of its ERROR, the reason of its BOUNCED, else empty."""
        last = self.last
        if last is None or last.kind is FrameKind.END:
            return ""
        return last.data.decode() if last.kind is FrameKind.BOUNCED else inference.decode_error(last.data).code


class FakeRouter:
    """Sends requests, keeps what comes back. Acknowledges everything unless told not to."""

    def __init__(self, bus: Bus, router_id: str = "r1") -> None:
        self.bus = bus
        self.router_id = router_id
        self.acknowledges = True
        self.answers: dict[tuple[str, int], Answer] = {}
        self.messages = 0
        self.largest_message_bytes = 0
        self._workers: set[str] = set()

    async def start(self) -> None:
        await self.bus.subscribe(inference.answer_subject(self.router_id), self._on_frames)
        await self.bus.subscribe(inference.router_ping_subject(self.router_id), self._on_ping)
        await self.bus.flush()

    async def ask(
        self, handle: Handle, worker_id: str = "w1", *, prompt: str = "hello", tokens: int = 8, stream: bool = True, **changes: Any
    ) -> tuple[str, int]:
        """Publishes a chat request; its (request_id, attempt)."""
        body = {"model": "x", "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "stream": stream}
        body |= changes.pop("fields", {})
        request = InferRequest(
            request_id=changes.pop("request_id", str(ULID())),
            attempt=changes.pop("attempt", 1),
            router_id=self.router_id,
            handle=handle,
            path=changes.pop("path", "/v1/chat/completions"),
            body=changes.pop("body", msgspec.json.encode(body)),
            stream=stream,
            **changes,
        )
        self.answers.setdefault((request.request_id, request.attempt), Answer())
        await self.bus.publish(inference.infer_subject(handle.subject_id, worker_id), inference.encode(request))
        return request.request_id, request.attempt

    async def answer(self, key: tuple[str, int], timeout_s: float = 10.0) -> Answer:
        """The attempt's answer once it has ended."""
        await eventually(lambda: self.answers[key].whole, timeout_s)
        return self.answers[key]

    async def asked(self, handle: Handle, worker_id: str = "w1", **options: Any) -> Answer:
        return await self.answer(await self.ask(handle, worker_id, **options))

    async def cancel(self, key: tuple[str, int], worker_id: str = "w1", reason: str = "client_gone") -> None:
        order = Cancel(request_id=key[0], attempt=key[1], reason=reason)
        await self.bus.publish(inference.control_subject(worker_id), inference.encode(order))

    async def resend(self, key: tuple[str, int], after_seq: int, worker_id: str = "w1") -> None:
        order = Resend(router_id=self.router_id, positions=((*key, after_seq),))
        await self.bus.publish(inference.control_subject(worker_id), inference.encode(order))

    async def acknowledge(self, positions: tuple[tuple[str, int, int], ...], worker_id: str) -> None:
        await self.bus.publish(inference.control_subject(worker_id), inference.encode(Ack(router_id=self.router_id, positions=positions)))

    async def _on_frames(self, message: Message) -> None:
        batch = inference.decode_batch(message.data)
        self.messages += 1
        self.largest_message_bytes = max(self.largest_message_bytes, len(message.data))
        positions: dict[tuple[str, int], int] = {}
        for frame in batch.frames:
            answer = self.answers.setdefault((frame.request_id, frame.attempt), Answer())
            if frame.kind is FrameKind.PROGRESS:
                answer.progress += 1
                continue
            if frame.seq in answer.frames:
                assert answer.frames[frame.seq] == frame, "a seq came twice with other content"
                answer.doubles += 1
            answer.frames[frame.seq] = frame
        missing: dict[tuple[str, int], int] = {}
        for frame in batch.frames:
            key = (frame.request_id, frame.attempt)
            seq = -1
            while seq + 1 in self.answers[key].frames:
                seq += 1
            positions[key] = seq
            if frame.seq > seq:
                missing[key] = seq
        if self.acknowledges:
            for key, seq in missing.items():
                await self.resend(key, seq, batch.worker_id)
            await self.acknowledge(tuple((*key, seq) for key, seq in positions.items()), batch.worker_id)

    async def _on_ping(self, message: Message) -> None:
        await self.bus.publish(message.reply, b"here")


class FakeRegistry:
    """One pool's entry in KV, artifacts, commands; carries acknowledgements into the entry as the real one does."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.hellos: list[WorkerHello] = []
        self.acks: list[AdapterLoaded | AdapterDrained | AdapterFailed] = []
        self.reports: dict[str, workers.WorkerReport] = {}
        self.usage: list[usage.AttemptUsage] = []
        self.refuse: Any = None
        self._bucket: Bucket | None = None
        self._objects: Objects | None = None

    async def start(self) -> None:
        self._bucket = await open_bucket(self.bus, state.STATE_BUCKET, create=True)
        self._objects = await open_objects(self.bus, adapters.ARTIFACTS_BUCKET, create=True)
        await ensure_stream(self.bus, adapters.COMMANDS_STREAM, adapters.COMMANDS_SUBJECTS)
        await ensure_stream(self.bus, adapters.ACKS_STREAM, adapters.ACKS_SUBJECTS)
        await ensure_stream(self.bus, usage.USAGE_STREAM, usage.USAGE_SUBJECTS)
        await self.bus.subscribe(workers.HELLO_SUBJECT, self._on_hello)
        await self.bus.subscribe(workers.REPORTS_SUBJECT, self._on_report)
        for subject in adapters.ACKS_SUBJECTS:
            await self.bus.subscribe(subject, self._on_ack)
        await self.bus.subscribe("tenantry.v1.usage.worker.*", self._on_usage)
        await self.bus.flush()

    async def entry(self) -> tuple[PoolEntry, int]:
        assert self._bucket is not None
        found = await self._bucket.get(state.POOL_PREFIX + POOL)
        if found is None:
            return PoolEntry(pool_id=POOL, base=""), 0
        return adapters.decode_pool(found.value), found.revision

    async def change(self, decide: Callable[[PoolEntry, int], PoolEntry]) -> int:
        """The new revision."""
        assert self._bucket is not None
        key = state.POOL_PREFIX + POOL
        while True:
            entry, revision = await self.entry()
            value = adapters.encode(decide(entry, revision))
            try:
                return await (self._bucket.update(key, value, revision) if revision else self._bucket.create(key, value))
            except Conflict:
                continue

    async def mount(self, adapter_id: str, *, files: dict[str, bytes] | None = None, worker_id: str = "w1", rank: int = 8) -> Mount:
        """Stores an artifact, puts a LOADING mount into the entry, sends the command."""
        archive = tar_of(files if files is not None else {"adapter_model.safetensors": adapter_id.encode()})
        sha256 = hashlib.sha256(archive).hexdigest()
        await self._store(f"a/{sha256}", archive)
        mount = Mount(
            adapter_id=adapter_id,
            tenant_id="t1",
            tenant="sales",
            name=f"lora_{adapter_id}",
            version=1,
            digest="sha256:" + sha256,
            worker_id=worker_id,
            state=AdapterState.LOADING,
            rank=rank,
            rank_class=rank,
            slot_bytes=rank * 1000,
            true_bytes=len(archive),
            artifact=f"a/{sha256}",
            artifact_sha256=sha256,
            artifact_bytes=len(archive),
        )
        await self.put(mount)
        return mount

    async def put(self, mount: Mount, *, command: bool = True) -> int:
        """Writes the mount as it is, ordered now, and tells its worker."""

        def decide(entry: PoolEntry, revision: int) -> PoolEntry:
            ordered = msgspec.structs.replace(mount, ordered_after=revision)
            return msgspec.structs.replace(entry, mounts={**entry.mounts, mount.adapter_id: ordered})

        generation = await self.change(decide)
        if command:
            await self.command(mount, generation)
        return generation

    async def command(self, mount: Mount, generation: int) -> None:
        drains = mount.state is AdapterState.DRAINING
        subject = (adapters.drain_subject if drains else adapters.load_subject)(mount.worker_id)
        kind = adapters.DrainAdapter if drains else adapters.LoadAdapter
        order = kind(pool_id=POOL, adapter_id=mount.adapter_id, generation=generation)
        await publish_durable(self.bus, subject, adapters.encode(order))

    async def drain(self, mount: Mount, order: DrainOrder | None = None) -> Mount:
        draining = msgspec.structs.replace(mount, state=AdapterState.DRAINING, drain=order or DrainOrder())
        await self.put(draining)
        return draining

    async def ready(self, *adapter_ids: str) -> None:
        """Returns once these are READY in the entry."""
        async with asyncio.timeout(10):
            while True:
                entry, _ = await self.entry()
                if all(a in entry.mounts and entry.mounts[a].state is AdapterState.READY for a in adapter_ids):
                    return
                await asyncio.sleep(0.01)

    async def share(self, tenant_id: str, limits: TenantLimits | None = None, worker_id: str = "w1", **part: Any) -> int:
        """Writes a tenant's limits and a worker's part of them; the revision. `part` without an incarnation is the newest one's."""
        assert self._bucket is not None
        part.setdefault("incarnation", next(h.incarnation for h in reversed(self.hellos) if h.worker_id == worker_id))
        shares = TenantShares(tenant_id=tenant_id, tenant=tenant_id, limits=limits or TenantLimits(), workers={worker_id: Share(**part)})
        return await self._bucket.put(shares_key(POOL, tenant_id), encode_shares(shares))

    async def shared(self, revision: int, worker_id: str = "w1") -> None:
        """Returns once the worker has reported that it enforces this revision."""
        await eventually(lambda: worker_id in self.reports and self.reports[worker_id].shares_revision >= revision)

    def acked(self, kind: type, adapter_id: str) -> list[Any]:
        return [ack for ack in self.acks if isinstance(ack, kind) and ack.adapter_id == adapter_id]

    async def _store(self, name: str, content: bytes) -> None:
        assert self._objects is not None
        path = Path(self._scratch) / hashlib.sha256(name.encode()).hexdigest()
        path.write_bytes(content)
        await self._objects.put_file(name, path)

    _scratch = ""

    def use_scratch(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._scratch = str(folder)

    async def _on_hello(self, message: Message) -> None:
        hello = workers.decode_hello(message.data)
        self.hellos.append(hello)
        if self.refuse is not None:
            await self.bus.publish(message.reply, admin.encode(admin.Reply(error=self.refuse)))
            return

        def decide(entry: PoolEntry, revision: int) -> PoolEntry:
            worker = PoolWorker(worker_id=hello.worker_id, incarnation=hello.incarnation, limits=hello.limits, engine=hello.engine)
            mounts = {
                adapter_id: msgspec.structs.replace(
                    mount,
                    state=AdapterState.LOADING if mount.state is AdapterState.READY else mount.state,
                    ordered_after=revision,
                )
                if mount.worker_id == hello.worker_id
                else mount
                for adapter_id, mount in entry.mounts.items()
            }
            return msgspec.structs.replace(
                entry, base=hello.base.identity, workers={**entry.workers, hello.worker_id: worker}, mounts=mounts
            )

        generation = await self.change(decide)
        result = msgspec.to_builtins(HelloAccepted(generation=generation))
        await self.bus.publish(message.reply, admin.encode(admin.Reply(result=result)))

    async def _on_report(self, message: Message) -> None:
        report = workers.decode_report(message.data)
        self.reports[report.worker_id] = report

    async def _on_usage(self, message: Message) -> None:
        self.usage += [record for record in usage.decode(message.data) if isinstance(record, usage.AttemptUsage)]

    async def _on_ack(self, message: Message) -> None:
        ack = adapters.decode_acknowledgement(message.data)
        self.acks.append(ack)

        def decide(entry: PoolEntry, _: int) -> PoolEntry:
            mount, worker = entry.mounts.get(ack.adapter_id), entry.workers.get(ack.worker_id)
            if mount is None or worker is None or worker.incarnation != ack.incarnation or ack.generation <= mount.ordered_after:
                return entry
            mounts = dict(entry.mounts)
            if isinstance(ack, AdapterLoaded) and mount.state is AdapterState.LOADING:
                mounts[ack.adapter_id] = msgspec.structs.replace(mount, state=AdapterState.READY)
            elif isinstance(ack, AdapterFailed) or mount.state is AdapterState.DRAINING:
                del mounts[ack.adapter_id]
            return msgspec.structs.replace(entry, mounts=mounts)

        await self.change(decide)


def tar_of(files: dict[str, bytes]) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        for name, content in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return whole.getvalue()


class WorkerHere:
    """A whole worker with the scripted engine in this process, on a connection of its own."""

    def __init__(self, worker: Worker, engine: ScriptedEngine, governor: Governor, bus: Bus, stop: Stop) -> None:
        self.worker = worker
        self.engine = engine
        self.governor = governor
        self.bus = bus
        self.stop = stop

    def handle(self, mount: Mount | None = None) -> Handle:
        base = self.engine.description.identity
        if mount is None:
            return Handle(tenant_id="t1", tenant="sales", pool_id=POOL, base=base)
        return Handle(
            tenant_id=mount.tenant_id,
            tenant=mount.tenant,
            pool_id=POOL,
            base=base,
            adapter_id=mount.adapter_id,
            alias=mount.name,
            version=mount.version,
            digest=mount.digest,
        )


@asynccontextmanager
async def worker_here(
    nats: EmbeddedNats, folder: Path, *, engine: ScriptedSettings | None = None, worker_id: str = "w1", **settings: Any
) -> AsyncIterator[WorkerHere]:
    """A ready worker; told to stop at the end if the test has not done so."""
    folder.mkdir(parents=True, exist_ok=True)
    values = WorkerSettings(worker_id=worker_id, engine=EngineKind.SCRIPTED, **{"grace_s": 2.0, **settings})
    governor = Governor()
    scripted = ScriptedEngine(engine or ScriptedSettings(), governor)
    await scripted.start()
    stop = Stop()
    bus = await connect(BusSettings(url=nats.url, name=f"worker-{worker_id}"))
    worker = Worker(values, scripted, governor, bus, folder)
    try:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(worker.run(stop))
            await eventually(lambda: worker.state == "ready" or running.done())
            yield WorkerHere(worker, scripted, governor, bus, stop)
            stop.set("test")
    finally:
        await bus.close()
