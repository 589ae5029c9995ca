"""How a step's time is split over the requests in it: by what each of them made the engine do, weighed by coefficients that are fitted to
the engine's own steps. Pure.

By token count alone prefill would be overbilled: a decoded row costs a step as much as many prompt tokens do.
"""

from collections.abc import Sequence
from itertools import combinations

import msgspec

from shared.contracts.usage import CostModel

MIB = 1 << 20
DEFAULTS = CostModel(prefill_token_us=25.0, decode_row_us=400.0, context_mib_us=0.5, adapter_mib_us=2.0)
_FEATURES = 4
_LEAST_STEPS = 32  # of a first fit
_HOLD = 1e-7
"""How strongly a fit holds on to the first model, at this engine's speed: a coefficient 3000 times as large is as bad as if every step
were off by all its time. Where steps do not tell coefficients apart, none goes astray that later steps would need."""

Features = tuple[float, float, float, float]


class Load(msgspec.Struct, frozen=True, array_like=True):
    """What one request was in one step."""

    prefill_tokens: int
    decode_rows: int
    context_bytes: int  # of KV cache that its attention read
    adapter: str = ""
    adapter_bytes: int = 0  # of the whole adapter; it is read once for all its rows


def split(total_us: int, weights: Sequence[float]) -> list[int]:
    """Whole microseconds in proportion to the weights; they add up to the total. Equal parts if nothing weighs anything."""
    if not weights:
        return []
    whole = sum(weights)
    exact = [total_us * weight / whole for weight in weights] if whole > 0 else [total_us / len(weights)] * len(weights)
    parts = [int(part) for part in exact]
    left = total_us - sum(parts)
    by_remainder = sorted(range(len(parts)), key=lambda index: (parts[index] - exact[index], index))
    for turn in range(abs(left)):  # beyond one round only where floats could not tell microseconds apart
        parts[by_remainder[turn % len(parts)]] += 1 if left > 0 else -1
    return parts


def weights(model: CostModel, loads: Sequence[Load]) -> list[float]:
    """What each request should have cost. An adapter's part is shared by its requests of the step."""
    sharing: dict[str, int] = {}
    for load in loads:
        if load.adapter:
            sharing[load.adapter] = sharing.get(load.adapter, 0) + 1
    return [
        model.prefill_token_us * load.prefill_tokens
        + model.decode_row_us * load.decode_rows
        + model.context_mib_us * load.context_bytes / MIB
        + (model.adapter_mib_us * load.adapter_bytes / MIB / sharing[load.adapter] if load.adapter else 0.0)
        for load in loads
    ]


def features(loads: Sequence[Load]) -> Features:
    """Of a whole step: prompt tokens, decoded rows, MiB of context, MiB of adapters."""
    adapters = {load.adapter: load.adapter_bytes for load in loads if load.adapter}
    return (
        float(sum(load.prefill_tokens for load in loads)),
        float(sum(load.decode_rows for load in loads)),
        sum(load.context_bytes for load in loads) / MIB,
        sum(adapters.values()) / MIB,
    )


class CostFit:
    """Non-negative least squares over the steps seen, of relative errors; older steps count less and less. Keeps sums, not steps."""

    def __init__(self, model: CostModel = DEFAULTS, keep: float = 0.9) -> None:
        self.model = model
        self._first = _values(model)
        self._keep = keep  # of what was seen before the last fit
        self._steps = 0
        self._since = 0
        self._weight = 0.0  # steps in the sums
        self._gram = [[0.0] * _FEATURES for _ in range(_FEATURES)]
        self._product = [0.0] * _FEATURES

    def add(self, step: Features, took_us: float) -> None:
        if took_us <= 0:
            return
        scaled = [feature / took_us for feature in step]
        for row, one in enumerate(scaled):
            if one:
                self._product[row] += one
                gram = self._gram[row]
                for column, other in enumerate(scaled):
                    gram[column] += one * other
        self._since += 1
        self._weight += 1.0

    def refit(self) -> CostModel:
        """The model from now on; as before, while too few steps are known."""
        if self._steps + self._since < _LEAST_STEPS or not self._since:
            return self.model
        gram = [row.copy() for row in self._gram]
        product = self._product.copy()
        expected = self._first_at_this_speed()
        for index, value in enumerate(expected):
            hold = _HOLD * self._weight / value**2
            gram[index][index] += hold
            product[index] += hold * value
        self._steps += self._since
        self._since = 0
        fitted = non_negative_least_squares(gram, product)
        self.model = CostModel(
            prefill_token_us=fitted[0],
            decode_row_us=fitted[1],
            context_mib_us=fitted[2],
            adapter_mib_us=fitted[3],
            fitted_steps=self._steps,
        )
        self._weight *= self._keep
        for row in range(_FEATURES):
            self._product[row] *= self._keep
            for column in range(_FEATURES):
                self._gram[row][column] *= self._keep
        return self.model

    def _first_at_this_speed(self) -> list[float]:
        """The first model times the one factor that fits the steps best."""
        first = self._first
        told = sum(value * product for value, product in zip(first, self._product, strict=True))
        square = sum(first[row] * first[column] * self._gram[row][column] for row in range(_FEATURES) for column in range(_FEATURES))
        return [value * told / square for value in first]


def non_negative_least_squares(gram: Sequence[Sequence[float]], product: Sequence[float]) -> list[float]:
    """The x >= 0 with the least |Ax - b|², from AᵀA (positive definite) and Aᵀb: the best of the solutions over every set of positive
    coefficients, which for a handful of them is exact and quick.
    """
    size = len(product)
    best, least = [0.0] * size, 0.0
    for count in range(1, size + 1):
        for chosen in combinations(range(size), count):
            solved = _solve([[gram[row][column] for column in chosen] for row in chosen], [product[row] for row in chosen])
            if solved is None or min(solved) < 0:
                continue
            error = -sum(value * product[row] for value, row in zip(solved, chosen, strict=True))  # beside |b|²
            if error < least:
                least = error
                best = [0.0] * size
                for value, row in zip(solved, chosen, strict=True):
                    best[row] = value
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """By Gauss with pivots; None for a singular matrix."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    scale = max(abs(value) for row in matrix for value in row)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        if abs(rows[pivot][column]) <= 1e-15 * scale:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(column + 1, size):
            factor = rows[row][column] / rows[column][column]
            for index in range(column, size + 1):
                rows[row][index] -= factor * rows[column][index]
    solved = [0.0] * size
    for row in reversed(range(size)):
        known = sum(rows[row][column] * solved[column] for column in range(row + 1, size))
        solved[row] = (rows[row][size] - known) / rows[row][row]
    return solved


def _values(model: CostModel) -> Features:
    return (model.prefill_token_us, model.decode_row_us, model.context_mib_us, model.adapter_mib_us)
