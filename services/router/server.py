"""uvicorn, run by us: own socket, own signals, and a connection that says at once when its client has gone."""

import contextlib
import logging
import socket
from collections.abc import Generator

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.router.asgi import AsgiApp
from shared.errors import StartFailed

ON_GONE = "tenantry.on_gone"  # scope key: called without arguments when the client's connection is lost


class Connection(HttpToolsProtocol):
    """A task that waits for `http.disconnect` would cost every request a task; this costs a look into the scope."""

    def connection_lost(self, exc: Exception | None) -> None:
        cycle = self.cycle
        super().connection_lost(exc)
        if cycle is not None and not cycle.response_complete:  # pyright: ignore[reportUnnecessaryComparison]
            on_gone = cycle.scope.get(ON_GONE)
            if on_gone is not None:
                on_gone()


class Server(uvicorn.Server):
    """Leaves signals to shared.runtime."""

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


def make_server(app: AsgiApp, grace_s: float) -> Server:
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # our own log has a line per request
    config = uvicorn.Config(
        app,  # pyright: ignore[reportArgumentType]
        http=Connection,
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=2048,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, int(grace_s) + 1),
    )
    return Server(config)
