"""The compatibility matrix: which base identities a label stands for, and explicit pairs of adapter and base."""

import re
from collections.abc import Callable

import msgspec
import structlog

from services.registry.store import Store
from shared.bus import Entry
from shared.contracts import admin, state
from shared.contracts.state import Matrix, PairEntry
from shared.errors import InvalidRequest, NotFound
from shared.policy.compatibility import is_identity

log = structlog.get_logger()

_LABEL = re.compile(r"[^\s\x00-\x1f]{1,256}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class MatrixService:
    """Every change answers with the whole matrix as it stands then."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def get(self, _request: admin.GetMatrix) -> Matrix:
        return await self._store.matrix()

    async def set_label(self, request: admin.SetLabel) -> Matrix:
        return await self.add_label(request.label, request.base)

    async def add_label(self, label: str, base: str, only_if_new: bool = False) -> Matrix:
        """The base is among those the label stands for; with `only_if_new` a label that has an entry is left alone."""
        if not _LABEL.fullmatch(label):
            raise InvalidRequest(f"{label[:80]!r} is no label (label or label@revision)", field="label", got=label[:80])
        _checked_identity(base)

        def add(matrix: Matrix) -> Matrix:
            known = matrix.labels.get(label, ())
            if base in known or (known and only_if_new):
                return matrix
            return msgspec.structs.replace(matrix, labels={**matrix.labels, label: (*known, base)})

        log.info("matrix.label_set", label=label, base=base, only_if_new=only_if_new)
        return await self._change(add)

    async def remove_label(self, request: admin.RemoveLabel) -> Matrix:
        """:raises NotFound: no such entry."""

        def remove(matrix: Matrix) -> Matrix:
            known = matrix.labels.get(request.label, ())
            if not known or (request.base and request.base not in known):
                raise NotFound(f"the label {request.label} has no entry {request.base}".rstrip(), label=request.label, base=request.base)
            left = tuple(base for base in known if request.base and base != request.base)
            labels = {label: bases for label, bases in matrix.labels.items() if label != request.label}
            return msgspec.structs.replace(matrix, labels=labels | ({request.label: left} if left else {}))

        log.info("matrix.label_removed", label=request.label, base=request.base)
        return await self._change(remove)

    async def set_pair(self, request: admin.SetPair) -> Matrix:
        """`adapter_digest`: a version's digest, or a label that stands for all versions made for it."""
        if not (_DIGEST.fullmatch(request.adapter_digest) or _LABEL.fullmatch(request.adapter_digest)):
            raise InvalidRequest(
                f"{request.adapter_digest[:80]!r} is neither sha256:<64 hex digits> nor a label",
                field="adapter_digest",
                got=request.adapter_digest[:80],
            )
        _checked_identity(request.base)
        entry = PairEntry(adapter_digest=request.adapter_digest, base=request.base, allowed=request.allowed, note=request.note)

        def put(matrix: Matrix) -> Matrix:
            others = tuple(pair for pair in matrix.pairs if (pair.adapter_digest, pair.base) != (entry.adapter_digest, entry.base))
            return msgspec.structs.replace(matrix, pairs=(*others, entry))

        log.info("matrix.pair_set", adapter=request.adapter_digest, base=request.base, allowed=request.allowed)
        return await self._change(put)

    async def remove_pair(self, request: admin.RemovePair) -> Matrix:
        """:raises NotFound: no such entry."""

        def remove(matrix: Matrix) -> Matrix:
            left = tuple(pair for pair in matrix.pairs if (pair.adapter_digest, pair.base) != (request.adapter_digest, request.base))
            if left == matrix.pairs:
                raise NotFound(f"the matrix has no entry for {request.adapter_digest} on {request.base}", base=request.base)
            return msgspec.structs.replace(matrix, pairs=left)

        log.info("matrix.pair_removed", adapter=request.adapter_digest, base=request.base)
        return await self._change(remove)

    async def _change(self, decide: Callable[[Matrix], Matrix]) -> Matrix:
        result = Matrix()

        async def encode(entry: Entry | None) -> bytes:
            nonlocal result
            result = decide(state.decode_matrix(entry.value) if entry else Matrix())
            return state.encode(result)

        await self._store.change(self._store.catalog, state.MATRIX_KEY, encode)
        return result


def _checked_identity(base: str) -> str:
    if not is_identity(base):
        raise InvalidRequest(f"{base[:120]!r} is no base identity; expected <label>@<64 hex digits>", field="base", got=base[:120])
    return base
