"""The router's one ASGI application: which plane a path belongs to, health, readiness, metrics."""

import asyncio

import msgspec

from services.router.asgi import AsgiApp, Receive, Scope, Send, answer_whole
from services.router.freshness import Freshness
from shared.bus import Bus

_encode = msgspec.json.Encoder().encode


class App:
    """Data-plane paths go to the data plane by themselves; only /admin/v1 meets FastAPI.

    `metrics` name tenants and their adapters, so whoever gives them in asks for a credential first.
    """

    def __init__(self, data_plane: AsgiApp, admin_plane: AsgiApp, freshness: Freshness, bus: Bus, metrics: AsgiApp) -> None:
        self.stopping = False
        self._data_plane = data_plane
        self._admin_plane = admin_plane
        self._freshness = freshness
        self._bus = bus
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path.startswith("/v1/"):
            await self._data_plane(scope, receive, send)
        elif path == "/admin/v1" or path.startswith("/admin/v1/"):
            await self._admin_plane(scope, receive, send)
        elif path == "/health":
            await answer_whole(send, 200, b'{"status":"ok"}', [])
        elif path == "/ready":
            reason = self.unready_because()
            body = {"ready": not reason} | ({"reason": reason} if reason else {})
            await answer_whole(send, 503 if reason else 200, _encode(body), [])
        elif path == "/metrics":
            await self._metrics(scope, receive, send)
        else:
            await self._data_plane(scope, receive, send)  # it knows how to say 404

    def unready_because(self) -> str:
        """Empty when the router may be sent requests."""
        if self.stopping:
            return "stopping"
        if not self._bus.connected:
            return "bus_unavailable"
        now_s = asyncio.get_running_loop().time()
        if self._freshness.age_s(now_s) == float("inf"):
            return "never_synced"
        return "routes_stale" if self._freshness.stale(now_s) else ""
