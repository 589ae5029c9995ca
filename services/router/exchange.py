"""One request on its way through the router: what was asked, what it resolved to, and how it ended."""

from collections.abc import Callable

from services.router.asgi import Headers
from services.router.charge import Charge
from services.router.resolve import Route
from services.router.streams import Answer
from shared.contracts.inference import Handle, Totals
from shared.contracts.state import Tenant
from shared.errors import Cancelled


class Exchange:
    """Mutable; owned by the request's own task, but for `client_gone`, which the connection calls."""

    __slots__ = (
        "answer",
        "attempts",
        "body",
        "charge",
        "client_label",
        "crowded",
        "delivered_bytes",
        "delivered_events",
        "first_byte_s",
        "gone",
        "hang_up",
        "headers",
        "key_id",
        "mark",
        "model",
        "outcome",
        "path",
        "query",
        "request_id",
        "route",
        "secret",
        "started_s",
        "status",
        "stream",
        "tenant",
        "totals",
        "worker_id",
        "write_piece",
    )

    def __init__(self, request_id: str, path: str, started_s: float) -> None:
        self.request_id = request_id
        self.path = path
        self.started_s = started_s  # loop time
        self.query = ""
        self.secret = ""
        self.mark = ""  # the routing header's value
        self.model = ""
        self.stream = False
        self.body = b""
        self.headers: Headers = []  # as the client sent them
        self.client_label = ""
        self.key_id = ""
        self.tenant: Tenant | None = None  # whom it speaks for, once its key was accepted
        self.route: Route | None = None
        self.answer: Answer | None = None  # of the attempt that runs
        self.attempts = 0
        self.crowded = ""  # the tenant among whose requests it counts in this router
        self.charge: Charge | None = None
        self.totals: Totals | None = None  # of the attempt that ended
        self.worker_id = ""
        self.gone = False
        self.hang_up: Callable[[], None] | None = None  # cuts the client's connection
        self.status = 0
        self.outcome = ""  # complete | error:<code> | client_gone
        self.delivered_bytes = 0
        self.delivered_events = 0
        self.first_byte_s = 0.0
        self.write_piece: Callable[[bytes], bool] | None = None  # the connection's, see server.py

    @property
    def handle(self) -> Handle | None:
        return None if self.route is None else self.route.handle

    def client_gone(self) -> None:
        """The client's connection is lost; the attempt that runs ends now."""
        self.gone = True
        if self.answer is not None:
            self.answer.fail(Cancelled("the client went away"))
