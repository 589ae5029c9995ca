"""Sums over a profile's kernels: (name, start_ns, duration_ns) each."""

from collections.abc import Iterable, Sequence

Event = tuple[str, int, int]


def busy_ms(events: Iterable[Event]) -> float:
    """Time in which at least one of them ran: kernels of two streams side by side count once."""
    total_ns, end_ns = 0, 0
    for start_ns, duration_ns in sorted((start_ns, duration_ns) for _, start_ns, duration_ns in events):
        begins_ns = max(start_ns, end_ns)
        end_ns = max(end_ns, start_ns + duration_ns)
        total_ns += max(0, end_ns - begins_ns)
    return total_ns / 1e6


def by_kernel(events: Sequence[Event], most: int = 40) -> list[tuple[str, int, float]]:
    """(name, launches, milliseconds), the longest first."""
    found: dict[str, tuple[int, int]] = {}
    for name, _, duration_ns in events:
        launches, total_ns = found.get(name, (0, 0))
        found[name] = (launches + 1, total_ns + duration_ns)
    rows = sorted(((name[:110], launches, total_ns / 1e6) for name, (launches, total_ns) in found.items()), key=lambda row: -row[2])
    return rows[:most]
