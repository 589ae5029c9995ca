"""Counters of the data plane as plain numbers, turned into Prometheus's form only when somebody looks."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from services.router.asgi import Receive, Scope, Send, answer_whole

_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Counts per bound, and the sum."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, value_s: float) -> None:
        self.counts[bisect_left(_BOUNDS_S, value_s)] += 1
        self.sum_s += value_s

    def buckets(self) -> list[tuple[str, float]]:
        rows: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*map(str, _BOUNDS_S), "+Inf"), self.counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows


class Metrics(Collector):
    """Incremented by the router's one loop, read by /metrics. `gauges` are read at that moment."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, str, int], int] = {}  # tenant, model, path, status
        self.duration: dict[tuple[str, str], Histogram] = {}  # tenant, model
        self.first_byte: dict[tuple[str, str], Histogram] = {}
        self.delivered_bytes = 0
        self.frames = 0
        self.frames_ignored = 0
        self.resends = 0
        self.redispatches = 0
        self.usage_dropped = 0
        self.rate_refusals: dict[str, int] = {}  # by kind
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        self.workers: Callable[[], Iterable[GaugeMetricFamily]] = tuple  # what workers say of themselves

    def request_done(self, tenant: str, model: str, path: str, status: int, duration_s: float, first_byte_s: float, sent: int) -> None:
        key = (tenant, model, path, status)
        self.requests[key] = self.requests.get(key, 0) + 1
        self.delivered_bytes += sent
        _histogram(self.duration, (tenant, model)).add(duration_s)
        if first_byte_s > 0:
            _histogram(self.first_byte, (tenant, model)).add(first_byte_s)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        self.gauges[name] = (text, read)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        requests = CounterMetricFamily("tenantry_requests", "Requests ended.", labels=["tenant", "model", "path", "status"])
        for (tenant, model, path, status), count in self.requests.items():
            requests.add_metric([tenant, model, path, str(status)], count)
        yield requests
        refusals = CounterMetricFamily("tenantry_rate_refusals", "Requests beyond a tenant's budget of the minute.", labels=["kind"])
        for kind, count in self.rate_refusals.items():
            refusals.add_metric([kind], count)
        yield refusals
        for name, text, found in (
            ("tenantry_request_seconds", "From the request's head to its end.", self.duration),
            ("tenantry_first_byte_seconds", "From the request's head to the first body byte sent.", self.first_byte),
        ):
            family = HistogramMetricFamily(name, text, labels=["tenant", "model"])
            for labels, histogram in found.items():
                family.add_metric(list(labels), histogram.buckets(), histogram.sum_s)
            yield family
        for name, text, value in (
            ("tenantry_delivered_bytes", "Body bytes handed to clients' connections.", self.delivered_bytes),
            ("tenantry_frames", "Frames received from workers.", self.frames),
            ("tenantry_frames_ignored", "Frames of attempts or incarnations that are over.", self.frames_ignored),
            ("tenantry_resends", "Frames asked for again.", self.resends),
            ("tenantry_redispatches", "Attempts after a request's first.", self.redispatches),
            ("tenantry_usage_dropped", "Outcomes that could not be kept for the usage stream.", self.usage_dropped),
        ):
            counter = CounterMetricFamily(name, text)
            counter.add_metric([], value)
            yield counter
        for name, (text, read) in self.gauges.items():
            yield GaugeMetricFamily(name, text, value=read())
        yield from self.workers()

    async def answer(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """An ASGI application."""
        await answer_whole(send, 200, self.text(), [], b"text/plain; version=0.0.4; charset=utf-8")

    def text(self) -> bytes:
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)


def _histogram(table: dict[tuple[str, str], Histogram], labels: tuple[str, str]) -> Histogram:
    found = table.get(labels)
    if found is None:
        found = table[labels] = Histogram()
    return found
