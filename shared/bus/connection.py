"""One NATS connection with Tenantry's defaults: reconnects for ever, bounded pending, typed errors, drops counted."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import nats
import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.js import JetStreamContext

from shared.errors import TenantryError

log = structlog.get_logger()

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
_PENDING_BYTES = 64 * 1024 * 1024
_DRAIN_RETRY_S = 0.05


class BusUnavailable(TenantryError):
    """The bus cannot be reached, or its outbound buffer is full: retry_after_s."""

    code = "bus_unavailable"


class NoResponder(TenantryError):
    """Nobody listens on the subject, said at once by the server."""

    code = "no_responder"


class RequestTimeout(TenantryError):
    """A reply did not come in time; the request may or may not have been acted on."""

    code = "bus_timeout"


class BusSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the bus is and who we are on it. `name` is also the inbox prefix, so that permissions can be narrow."""

    url: str
    name: str
    user: str = ""
    password: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""


class Message(msgspec.Struct, frozen=True):
    """What a subscription hands over. `status` is "503" when a publish with this reply subject met no responder."""

    subject: str
    data: bytes
    reply: str
    status: str


Handler = Callable[[Message], Awaitable[None] | None]
Listener = Callable[[], Awaitable[None] | None]


class _Client(Client):
    """nats-py 2.16 sends flush's PING past what still waits to be written, so that its PONG proves nothing about it.

    Subscriptions would not be heard yet, and `drain` would drop what is delivered between PONG and UNSUB.
    """

    async def flush(self, timeout: int = 10) -> None:
        await self._flush_pending(force_flush=True)
        await super().flush(timeout)


class Subscription:
    """A live interest in a subject; ends by `drain` (what was delivered is still handled) or with the connection."""

    def __init__(self, bus: "Bus", inner: NatsSubscription) -> None:
        self._bus = bus
        self._inner = inner

    @property
    def subject(self) -> str:
        return self._inner.subject

    async def drain(self) -> None:
        """Interest removed and confirmed, then every message already delivered handled. Idempotent.

        Tried until the server confirms, also over a reconnect: a client that drains only once while disconnected is subscribed
        again after the reconnect, and nobody would know.
        """
        await self._bus.end(self._inner)


class Bus:
    """Made by `connect`; closed by `close`. Safe for use by any number of tasks of one loop."""

    def __init__(self, settings: BusSettings) -> None:
        self.settings = settings
        self.dropped_messages = 0
        self.disconnects = 0
        self._client = _Client()
        self._js: JetStreamContext | None = None
        self._opened = False
        self._open_error: Exception | None = None
        self._on_reconnect: list[Listener] = []
        self._on_disconnect: list[Listener] = []

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    @property
    def js(self) -> JetStreamContext:
        """For this package only: buckets and streams are built on it."""
        assert self._js is not None
        return self._js

    @property
    def inbox_prefix(self) -> str:
        return f"_INBOX_{self.settings.name}"

    def on_reconnect(self, listener: Listener) -> None:
        self._on_reconnect.append(listener)

    def on_disconnect(self, listener: Listener) -> None:
        self._on_disconnect.append(listener)

    async def _open(self) -> None:
        options: dict[str, Any] = {}
        if self.settings.user:
            options |= {"user": self.settings.user, "password": self.settings.password}
        if self.settings.tls_ca:
            context = ssl.create_default_context(cafile=self.settings.tls_ca)
            if self.settings.tls_cert:
                context.load_cert_chain(self.settings.tls_cert, self.settings.tls_key)
            options["tls"] = context
        try:
            await self._client.connect(
                self.settings.url,
                name=self.settings.name,
                inbox_prefix=self.inbox_prefix.encode(),
                allow_reconnect=False,  # a first connection that fails is the caller's to retry
                max_reconnect_attempts=1,
                reconnect_time_wait=0.1,  # pyright: ignore[reportArgumentType]  (seconds, a float works)
                ping_interval=10,
                max_outstanding_pings=2,
                pending_size=_PENDING_BYTES,
                connect_timeout=2,
                drain_timeout=10,
                error_cb=self._error,
                disconnected_cb=self._disconnected,
                reconnected_cb=self._reconnected,
                skip_subject_validation=True,
                **options,
            )
        except (OSError, nats.errors.Error, TimeoutError) as error:
            why = self._open_error or error
            raise BusUnavailable(f"cannot connect to NATS at {self.settings.url}: {why}", retry_after_s=1.0) from error
        self._client.options |= {"allow_reconnect": True, "max_reconnect_attempts": -1}
        self._opened = True
        self._js = self._client.jetstream(timeout=5)

    async def publish(self, subject: str, data: bytes, reply: str = "", headers: dict[str, str] | None = None) -> None:
        """Core NATS, at most once; buffered while reconnecting.

        :raises BusUnavailable: closed, or the buffer is full.
        """
        try:
            await self._client.publish(subject, data, reply=reply, headers=headers)
        except (nats.errors.OutboundBufferLimitError, nats.errors.ConnectionClosedError) as error:
            raise BusUnavailable(f"cannot publish: {error}", retry_after_s=1.0) from error

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        """One reply.

        :raises NoResponder: nobody listens.
        :raises RequestTimeout: no reply in timeout_s.
        :raises BusUnavailable: closed, or the buffer is full.
        """
        try:
            message = await self._client.request(subject, data, timeout=timeout_s)
        except nats.errors.NoRespondersError as error:
            raise NoResponder(f"nobody listens on {subject}") from error
        except (nats.errors.TimeoutError, TimeoutError) as error:
            raise RequestTimeout(f"no reply on {subject} in {timeout_s} s", timeout_s=timeout_s) from error
        except (nats.errors.OutboundBufferLimitError, nats.errors.ConnectionClosedError) as error:
            raise BusUnavailable(f"cannot send: {error}", retry_after_s=1.0) from error
        return message.data

    async def subscribe(
        self, subject: str, handler: Handler, *, queue: str = "", pending: int = 65_536, pending_bytes: int = 128 << 20
    ) -> Subscription:
        """Hands every message to `handler`, one after another; it must be quick (start a task for what is long).

        At most `pending` messages wait; beyond that the newest is dropped and counted in `dropped_messages`.
        """

        async def deliver(message: Msg) -> None:
            status = (message.headers or {}).get("Status", "")
            result = handler(Message(message.subject, message.data, message.reply, status))
            if result is not None:
                await result

        inner = await self._client.subscribe(
            subject, queue=queue, cb=deliver, pending_msgs_limit=pending, pending_bytes_limit=pending_bytes
        )
        return Subscription(self, inner)

    async def flush(self, timeout_s: float = 5.0) -> None:
        """Everything published and subscribed so far has reached the server.

        :raises RequestTimeout: it did not answer in timeout_s.
        :raises BusUnavailable: disconnected, or disconnected meanwhile: nothing is known.
        """
        disconnects = self.disconnects
        try:
            await self._client.flush(timeout=timeout_s)  # pyright: ignore[reportArgumentType]
        except (nats.errors.TimeoutError, TimeoutError) as error:
            raise RequestTimeout(f"the bus did not confirm in {timeout_s} s", timeout_s=timeout_s) from error
        except nats.errors.Error as error:
            raise BusUnavailable(f"cannot flush: {error}", retry_after_s=1.0) from error
        if not self._client.is_connected or self.disconnects != disconnects:
            raise BusUnavailable("the connection was lost before the bus confirmed", retry_after_s=1.0)

    async def end(self, inner: NatsSubscription) -> None:
        """For `Subscription.drain`, which says what it does (nats-py's own drain gives up when the connection is lost meanwhile)."""
        while not await self._removed(inner):
            await asyncio.sleep(_DRAIN_RETRY_S)
        self._client._remove_sub(inner._id)  # pyright: ignore[reportPrivateUsage]
        await inner._pending_queue.join()  # pyright: ignore[reportPrivateUsage]
        inner._stop_processing()  # pyright: ignore[reportPrivateUsage]
        inner._closed = True  # pyright: ignore[reportPrivateUsage]

    async def _removed(self, inner: NatsSubscription) -> bool:
        """Whether the server has confirmed that it sends this subscription nothing more (or there is no connection any more)."""
        if self._client.is_closed or self._client.is_draining or inner._closed:  # pyright: ignore[reportPrivateUsage]
            return True
        if not self._client.is_connected:
            return False
        await self._client._send_unsubscribe(inner._id)  # pyright: ignore[reportPrivateUsage]
        try:
            await self.flush()
        except (RequestTimeout, BusUnavailable):
            return self._client.is_closed
        return True

    async def close(self) -> None:
        """Drains subscriptions and pending publishes when connected, then closes."""
        if self._client.is_closed:
            return
        try:
            if self._client.is_connected:
                await self._client.drain()
            else:
                await self._abandon()
        except (nats.errors.Error, TimeoutError, OSError, RuntimeError):
            await self._abandon()

    async def _abandon(self) -> None:
        """Closes without the server. What was still to be sent is dropped first: nats-py would write it to the dead transport."""
        self._client._pending.clear()  # pyright: ignore[reportPrivateUsage]
        self._client._pending_data_size = 0  # pyright: ignore[reportPrivateUsage]
        await self._client.close()

    async def _error(self, error: Exception) -> None:
        if not self._opened:
            self._open_error = error
            return
        if isinstance(error, nats.errors.SlowConsumerError):
            self.dropped_messages += 1
            log.error("bus.message_dropped", subject=error.subject, dropped_total=self.dropped_messages)
            return
        log.warning("bus.error", error=str(error) or type(error).__name__)

    async def _disconnected(self) -> None:
        self.disconnects += 1
        log.warning("bus.disconnected", url=self.settings.url)
        await _tell(self._on_disconnect)

    async def _reconnected(self) -> None:
        log.info("bus.reconnected", url=self.settings.url)
        await _tell(self._on_reconnect)


async def _tell(listeners: list[Listener]) -> None:
    for listener in listeners:
        result = listener()
        if result is not None:
            await result


async def connect(settings: BusSettings) -> Bus:
    """A connected bus.

    :raises BusUnavailable: the server cannot be reached or refuses us (the message says which).
    """
    bus = Bus(settings)
    await bus._open()  # pyright: ignore[reportPrivateUsage]
    return bus


async def connect_with_patience(settings: BusSettings, patience_s: float) -> Bus:
    """`connect`, tried again for up to patience_s: services may start before their bus."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + patience_s
    while True:
        try:
            return await connect(settings)
        except BusUnavailable:
            if loop.time() >= give_up_at:
                raise
            await asyncio.sleep(0.2)


def settings_from(env: Mapping[str, str], name: str) -> BusSettings:
    """TENANTRY_NATS_URL, _USER, _PASSWORD or _PASSWORD_FILE, _TLS_CA, _TLS_CERT, _TLS_KEY."""
    password_file = env.get("TENANTRY_NATS_PASSWORD_FILE", "")
    password = Path(password_file).read_text().strip() if password_file else env.get("TENANTRY_NATS_PASSWORD", "")
    return BusSettings(
        url=env.get("TENANTRY_NATS_URL", "nats://127.0.0.1:4222"),
        name=name,
        user=env.get("TENANTRY_NATS_USER", ""),
        password=password,
        tls_ca=env.get("TENANTRY_NATS_TLS_CA", ""),
        tls_cert=env.get("TENANTRY_NATS_TLS_CERT", ""),
        tls_key=env.get("TENANTRY_NATS_TLS_KEY", ""),
    )
