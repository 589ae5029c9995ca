"""Stand-ins on real NATS for what a router talks to: a worker that does as told, a registry that only writes state; and the router."""

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from services.router.settings import RouterSettings
from services.router.stack import Router
from shared.bus import Bucket, Bus, BusSettings, Message, Subscription, connect, ensure_stream, open_bucket
from shared.bus.embedded import EmbeddedNats
from shared.contracts import state, workers
from shared.contracts.adapters import Mount, PoolEntry, PoolWorker, encode
from shared.contracts.base import EngineLimits
from shared.contracts.errors import ErrorInfo
from shared.contracts.inference import (
    Ack,
    Cancel,
    Frame,
    FrameBatch,
    FrameKind,
    Head,
    InferRequest,
    Resend,
    Totals,
    answer_subject,
    base_subject_id,
    control_subject,
    decode_control,
    decode_request,
    infer_subject,
    worker_ping_subject,
)
from shared.contracts.inference import encode as encode_frames
from shared.contracts.usage import USAGE_STREAM, USAGE_SUBJECTS
from shared.policy.lifecycle import AdapterState
from shared.runtime import Stop, end

BASE = "demo@" + "ab" * 32
ADMIN_KEY = "admin-secret"
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/tokenize")
SALES_KEY = "sk-sales"
CS_KEY = "sk-cs"
GATEWAY_KEY = "sk-gateway"


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def mount(name: str, tenant: str, *, version: int = 1, state: AdapterState = AdapterState.READY, worker_id: str = "w0") -> Mount:
    return Mount(
        adapter_id=f"ad_{tenant}_{name}_{version}",
        tenant_id=f"t_{tenant}",
        tenant=tenant,
        name=name,
        version=version,
        digest=f"sha256:{sha256(f'{tenant}/{name}/{version}')}",
        worker_id=worker_id,
        state=state,
        rank=8,
        rank_class=8,
        slot_bytes=1000,
        true_bytes=900,
    )


def pool_entry(
    *mounts: Mount,
    workers: tuple[str, ...] = ("w0",),
    aliases: dict[str, dict[str, str]] | None = None,
    pool_id: str = "main",
    base: str = BASE,
    endpoints: tuple[str, ...] = ENDPOINTS,
    incarnation: str = "01A",
) -> PoolEntry:
    """Aliases as given, else each READY mount serves its own name."""
    if aliases is None:
        aliases = {}
        for each in mounts:
            if each.state is AdapterState.READY:
                aliases.setdefault(each.tenant, {})[each.name] = each.adapter_id
    limits = EngineLimits(slots=4, max_rank=16, bytes_per_rank=100, endpoints=endpoints)
    return PoolEntry(
        pool_id=pool_id,
        base=base,
        workers={name: PoolWorker(worker_id=name, incarnation=incarnation, limits=limits) for name in workers},
        mounts={each.adapter_id: each for each in mounts},
        aliases=aliases,
    )


def tenants(*names: str, **options: Any) -> dict[str, state.Tenant]:
    return {name: state.Tenant(tenant_id=f"t_{name}", name=name, **options) for name in names}


def keys() -> dict[str, state.ApiKey]:
    """By secret."""
    return {
        SALES_KEY: state.ApiKey(key_id="k1", label="", tenants=("sales",)),
        CS_KEY: state.ApiKey(key_id="k2", label="", tenants=("cs",)),
        GATEWAY_KEY: state.ApiKey(key_id="k3", label="", tenants=("sales", "cs"), gateway=True),
    }


class FakeRegistry:
    """Owns the STATE bucket: writes what a test says, and the heartbeat while `beating`."""

    def __init__(self, bus: Bus, bucket: Bucket) -> None:
        self.bus = bus
        self.bucket = bucket
        self.beating = True
        self._beat = itertools.count()

    async def run(self) -> None:
        while True:
            if self.beating and self.bus.connected:
                try:
                    async with asyncio.timeout(1):
                        await self.bucket.put(state.HEARTBEAT_KEY, str(next(self._beat)).encode())
                except Exception:  # the test has taken NATS away
                    await asyncio.sleep(0.05)
            await asyncio.sleep(0.1)

    async def put_pool(self, entry: PoolEntry) -> None:
        await self.bucket.put(state.POOL_PREFIX + entry.pool_id, encode(entry))

    async def put_key(self, secret: str, key: state.ApiKey) -> None:
        await self.bucket.put(state.KEY_PREFIX + sha256(secret), state.encode(key))

    async def put_tenant(self, tenant: state.Tenant) -> None:
        await self.bucket.put(state.TENANT_PREFIX + tenant.name, state.encode(tenant))

    async def put_routing(self, routing: state.Routing) -> None:
        await self.bucket.put(state.ROUTING_KEY, state.encode(routing))


class Attempt:
    """One attempt as the fake worker read it, and the means to answer it frame by frame."""

    def __init__(self, worker: "FakeWorker", request: InferRequest) -> None:
        self.worker = worker
        self.request = request
        self.cancelled = asyncio.Event()
        self.cancel_reason = ""
        self.next_seq = 0
        self.kept: list[Frame] = []
        self.acked_seq = -1

    def frame(self, kind: FrameKind, data: bytes = b"") -> Frame:
        """The next one in order; kept for resends."""
        frame = Frame(self.request.request_id, self.request.attempt, self.next_seq, kind, data)
        self.next_seq += 1
        self.kept.append(frame)
        return frame

    async def send(self, *frames: Frame, incarnation: str = "") -> None:
        batch = FrameBatch(self.worker.worker_id, incarnation or self.worker.incarnation, list(frames))
        await self.worker.bus.publish(answer_subject(self.request.router_id), encode_frames(batch))

    async def say(self, kind: FrameKind, data: bytes = b"") -> None:
        await self.send(self.frame(kind, data))

    async def accept(self) -> None:
        await self.say(FrameKind.ACCEPTED)

    async def progress(self) -> None:
        await self.send(Frame(self.request.request_id, self.request.attempt, self.next_seq - 1, FrameKind.PROGRESS))

    async def head(self, status: int = 200, content_type: str = "text/event-stream; charset=utf-8") -> None:
        await self.say(FrameKind.HEAD, encode_frames(Head(status=status, content_type=content_type)))

    async def token(self, text: str) -> None:
        await self.say(FrameKind.BODY, b"data: " + text.encode() + b"\n\n")

    async def end(self) -> None:
        await self.say(FrameKind.END, encode_frames(Totals(completion_tokens=self.next_seq)))

    async def error(self, code: str, message: str = "no", **fields: Any) -> None:
        await self.say(FrameKind.ERROR, encode_frames(ErrorInfo(code=code, message=message, fields=fields)))

    async def bounce(self, reason: str = "draining") -> None:
        await self.say(FrameKind.BOUNCED, reason.encode())

    async def answer(self, *, delay_s: float = 0.0) -> None:
        """A whole answer that names what served it, streamed or not as was asked."""
        await self.accept()
        handle = self.request.handle
        if self.request.stream:
            await self.head()
            for text in (handle.public_model, "one", "two", "[DONE]"):
                await self.token(text)
                await asyncio.sleep(delay_s)
        else:
            await self.head(content_type="application/json")
            body = {"model": handle.public_model, "digest": handle.digest, "attempt": self.request.attempt}
            await self.say(FrameKind.BODY, msgspec.json.encode(body))
        await self.end()


Behaviour = Callable[[Attempt], Awaitable[None]]


async def answers(attempt: Attempt) -> None:
    await attempt.answer()


class FakeWorker:
    """Holds subjects; runs `behaviour` for each attempt; remembers what it was told."""

    def __init__(self, bus: Bus, worker_id: str = "w0", incarnation: str = "01A") -> None:
        self.bus = bus
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.behaviour: Behaviour = answers
        self.attempts: list[Attempt] = []
        self.acks: list[Ack] = []
        self.resends: list[Resend] = []
        self.obeys_resends = True
        self.pings = 0
        self._subscriptions: dict[str, Subscription] = {}
        self._group: asyncio.TaskGroup | None = None

    async def start(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        for subject, handler in (
            (control_subject(self.worker_id), self._control),
            (worker_ping_subject(self.worker_id), self._ping),
        ):
            self._subscriptions[subject] = await self.bus.subscribe(subject, handler)
        await self.hold(base_subject_id(BASE))
        await self.bus.flush()

    async def hold(self, subject_id: str) -> None:
        subject = infer_subject(subject_id, self.worker_id)
        self._subscriptions[subject] = await self.bus.subscribe(subject, self._read)
        await self.bus.flush()

    async def drop(self, subject_id: str) -> None:
        await self._subscriptions.pop(infer_subject(subject_id, self.worker_id)).drain()
        await self.bus.flush()

    async def die(self) -> None:
        """No subject of it has a responder any more."""
        for subscription in self._subscriptions.values():
            await subscription.drain()
        self._subscriptions.clear()
        await self.bus.flush()

    async def report(self, in_flight: int = 0, *, capacity: int = 8, state: str = "ready", incarnation: str = "") -> None:
        report = workers.WorkerReport(
            worker_id=self.worker_id,
            incarnation=incarnation or self.incarnation,
            pool_id="main",
            generation=1,
            state=state,
            in_flight=in_flight,
            waiting=0,
            capacity=capacity,
            base=workers.AdapterUse(adapter_id="", residency="device"),
            completion_tokens_per_s=12.5,
        )
        await self.bus.publish(workers.report_subject(self.worker_id), workers.encode(report))
        await self.bus.flush()

    def attempt(self, number: int) -> Attempt:
        return self.attempts[number]

    def _read(self, message: Message) -> None:
        attempt = Attempt(self, decode_request(message.data))
        self.attempts.append(attempt)
        assert self._group is not None
        self._group.create_task(self.behaviour(attempt))

    async def _control(self, message: Message) -> None:
        control = decode_control(message.data)
        if isinstance(control, Cancel):
            for attempt in self.attempts:
                if (attempt.request.request_id, attempt.request.attempt) == (control.request_id, control.attempt):
                    attempt.cancel_reason = control.reason
                    attempt.cancelled.set()
        elif isinstance(control, Ack):
            self.acks.append(control)
            for request_id, number, seq in control.positions:
                for attempt in self.attempts:
                    if (attempt.request.request_id, attempt.request.attempt) == (request_id, number):
                        attempt.acked_seq = max(attempt.acked_seq, seq)
        else:
            self.resends.append(control)
            for request_id, number, after_seq in control.positions if self.obeys_resends else ():
                for attempt in self.attempts:
                    if (attempt.request.request_id, attempt.request.attempt) == (request_id, number):
                        await attempt.send(*[frame for frame in attempt.kept if frame.seq > after_seq])

    async def _ping(self, message: Message) -> None:
        self.pings += 1
        await self.bus.publish(message.reply, self.incarnation.encode())


class Cluster:
    """A router with its fakes."""

    def __init__(self, nats: EmbeddedNats, router: Router, registry: FakeRegistry, worker: FakeWorker, client: httpx.AsyncClient) -> None:
        self.nats = nats
        self.router = router
        self.registry = registry
        self.worker = worker
        self.client = client
        self.port = 0
        self.stop = Stop()
        self.group: asyncio.TaskGroup | None = None

    async def ask(self, model: str | None = "tone", *, key: str = SALES_KEY, stream: bool = False, **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} | options.pop("headers", {})
        body = ({} if model is None else {"model": model}) | {"stream": stream, "messages": []}
        return await self.client.post(options.pop("path", "/v1/chat/completions"), json=body, headers=headers, **options)

    def streaming(self, model: str = "tone", *, key: str = SALES_KEY, path: str = "/v1/chat/completions") -> Any:
        headers = {"authorization": f"Bearer {key}"}
        return self.client.stream("POST", path, json={"model": model, "stream": True}, headers=headers)

    async def second_worker(self, worker_id: str = "w1") -> FakeWorker:
        assert self.group is not None
        worker = FakeWorker(self.registry.bus, worker_id)
        await worker.start(self.group)
        return worker


@asynccontextmanager
async def cluster(nats: EmbeddedNats, *, entry: PoolEntry | None = None, **settings: Any) -> AsyncIterator[Cluster]:
    """A running router whose routes are current: tenants sales (adapter `tone`) and cs (adapter `help`), one worker w0."""
    entry = entry or pool_entry(mount("tone", "sales"), mount("help", "cs"))
    settings = {"admin_key_sha256": sha256(ADMIN_KEY), "port": 0, "grace_s": 5.0} | settings
    router = Router(RouterSettings(**settings), "r_test")
    port = router.listen()
    bus = await connect(BusSettings(url=nats.url, name="fakes"))
    router_bus = await connect(BusSettings(url=nats.url, name="router"))
    registry = FakeRegistry(bus, await open_bucket(bus, state.STATE_BUCKET, create=True))
    await ensure_stream(bus, USAGE_STREAM, USAGE_SUBJECTS)
    for tenant in tenants("sales", "cs").values():
        await registry.put_tenant(tenant)
    for secret, key in keys().items():
        await registry.put_key(secret, key)
    await registry.put_pool(entry)
    worker = FakeWorker(bus)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as client:
        running = Cluster(nats, router, registry, worker, client)
        running.port = port
        async with asyncio.TaskGroup() as group:
            running.group = group
            await worker.start(group)
            for each in entry.mounts.values():
                if each.worker_id == worker.worker_id:
                    await worker.hold(each.adapter_id)
            beating = group.create_task(registry.run())
            serving = group.create_task(router.run(router_bus, running.stop))
            try:
                await until_ready(client)
                yield running
            finally:
                running.stop.set("test over")
                await asyncio.wait([serving], timeout=20)
                await end([beating, serving])
                for attempt in worker.attempts:
                    attempt.cancelled.set()
    await bus.close()


async def until_ready(client: httpx.AsyncClient) -> None:
    async def ready() -> bool:
        return (await client.get("/ready")).status_code == 200

    await until(ready)


async def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    """Waits for the condition (or the awaitable that it gives) to hold."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = condition()
            if await found if isinstance(found, Awaitable) else found:
                return
            await asyncio.sleep(0.01)


def events(text: str) -> list[str]:
    return [line[6:] for line in text.splitlines() if line.startswith("data: ")]
