"""uvicorn, run by us: own socket, own signals, and a connection that says at once when its client has gone."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Generator
from itertools import islice
from typing import Any, cast

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.router.asgi import AsgiApp
from shared.errors import StartFailed

_HEAD_LIMIT_BYTES = 256 * 1024  # one read of the socket may bring as much of a body with it
_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_HEAD_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_NO_ROOM = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
_LOOKED_AT = 64  # idle connections, to find one of long standing
_LOOK_EVERY = 5  # of uvicorn's ticks, ten a second

ON_GONE = "tenantry.on_gone"  # scope key: called without arguments when the client's connection is lost
HANG_UP = "tenantry.hang_up"  # scope key: cuts the connection at once, whatever waits to be written
BODY_WHOLE = "tenantry.body_whole"  # set once the whole body has come, usually before the application starts
WRITE_PIECE = "tenantry.write_piece"  # scope key: Connection.write_piece


class JoinedWrites:
    """A transport whose writes of one turn of the loop go out in one system call: a head with its body, an end with its last piece."""

    __slots__ = ("_inner", "_loop", "_pieces", "get_extra_info", "is_closing", "pause_reading", "resume_reading")

    def __init__(self, inner: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._inner = inner
        self._loop = loop
        self._pieces: list[bytes] = []
        self.get_extra_info = inner.get_extra_info
        self.is_closing = inner.is_closing
        self.pause_reading = inner.pause_reading
        self.resume_reading = inner.resume_reading

    def write(self, data: bytes) -> None:
        pieces = self._pieces
        if not pieces:
            self._loop.call_soon(self._flush)
        pieces.append(data)

    def _flush(self) -> None:
        pieces = self._pieces
        self._pieces = []
        if pieces and not self.is_closing():
            self._inner.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def close(self) -> None:
        self._flush()
        self._inner.close()

    def abort(self) -> None:
        self._pieces = []
        self._inner.abort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    head_timeout_s: float = 10.0
    keep_alive_s: int = 75
    max_connections: int = 16_384


class Connection(HttpToolsProtocol):
    """A task that waits for `http.disconnect` would cost every request a task; this costs a look into the scope."""

    limits = ConnectionLimits()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, JoinedWrites(transport, self.loop)))
        self._head_bytes = 0
        self._in_head = True
        self.since_s = self.loop.time()  # it was made, or last asked something
        self._head_due_s: float | None = self.since_s + self.limits.head_timeout_s
        if len(self.connections) > self.limits.max_connections and not self._make_room():
            self.transport.write(_NO_ROOM)
            self.transport.close()

    @property
    def is_idle(self) -> bool:
        """Nothing of it is being answered."""
        return self.cycle is None or self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]

    def _make_room(self) -> bool:
        """Closes another connection on which nothing is asked, one of long standing; whether there was one."""
        others = (cast(Connection, one) for one in self.connections if one is not self)
        idle = list(islice((one for one in others if one.is_idle), _LOOKED_AT))
        if not idle:
            return False
        oldest = min(idle, key=lambda one: one.since_s)
        self.connections.discard(oldest)
        oldest.transport.close()
        return True

    def look(self, now_s: float) -> None:
        """Ends a head that has been on its way for too long, unless an earlier request on the connection is still being answered."""
        if self._head_due_s is None or now_s < self._head_due_s or not self.is_idle or self.transport.is_closing():
            return
        if self._head_bytes:
            self.transport.write(_HEAD_TOO_SLOW)
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self.timeout_keep_alive_task is not None:  # which any byte ends, be it of a head or not
            self._head_due_s = self.loop.time() + self.limits.head_timeout_s
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_LIMIT_BYTES and not self.transport.is_closing():
                self.transport.write(_HEAD_TOO_LARGE)
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[HANG_UP] = self.transport.abort
        self._head_bytes = 0
        self._in_head = True
        self.since_s = self.loop.time()
        if self._head_due_s is None:
            self._head_due_s = self.since_s + self.limits.head_timeout_s

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_due_s = None
        super().on_headers_complete()
        self.scope[WRITE_PIECE] = self.write_piece  # pyright: ignore[reportGeneralTypeIssues]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        cast(dict[str, Any], self.scope)[BODY_WHOLE] = True

    def write_piece(self, body: bytes) -> bool:
        """Writes one more piece of a chunked answer whose head has gone out, without a task. False: the connection takes nothing now."""
        if self.flow.write_paused or self.transport.is_closing():
            return False
        if body:
            self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        cycle = self.cycle
        super().connection_lost(exc)
        if cycle is not None and not cycle.response_complete:  # pyright: ignore[reportUnnecessaryComparison]
            on_gone = cycle.scope.get(ON_GONE)
            if on_gone is not None:
                on_gone()


class Server(uvicorn.Server):
    """Leaves signals to shared.runtime."""

    def hang_up(self) -> None:
        """Cuts every connection."""
        for connection in list(self.server_state.connections):
            cast(Connection, connection).transport.abort()

    async def on_tick(self, counter: int) -> bool:
        if counter % _LOOK_EVERY == 0:
            now_s = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                cast(Connection, connection).look(now_s)
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, not accepting yet.

    :raises StartFailed: the port is taken, or the address is not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise StartFailed(
            f"cannot listen on {host}:{port}: {error.strerror}; stop what holds it or set TENANTRY_ROUTER_PORT", host=host, port=port
        ) from error
    listener.setblocking(False)
    return listener


def make_server(app: AsgiApp, grace_s: float, limits: ConnectionLimits) -> Server:
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # our own log has a line per request
    config = uvicorn.Config(
        app,  # pyright: ignore[reportArgumentType]
        http=type("LimitedConnection", (Connection,), {"limits": limits}),
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=2048,
        timeout_keep_alive=limits.keep_alive_s,
        timeout_graceful_shutdown=max(1, int(grace_s) + 1),
    )
    return Server(config)
