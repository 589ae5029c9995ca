"""Which base an adapter was made for, and whether it may go on a pool's base: exact identities and explicit entries only."""

import re

import msgspec

from shared.contracts.state import Matrix, PairEntry, Provenance
from shared.errors import BaseMismatch, BaseUnknown, IncompatiblePair

_IDENTITY = re.compile(r"[^@\s]+@[0-9a-f]{64}")


class BaseClaim(msgspec.Struct, frozen=True, kw_only=True):
    """The base an adapter says it is for, and who says so. `label` is the key it was or would be looked up by."""

    identity: str
    provenance: Provenance
    label: str = ""


def is_identity(text: str) -> bool:
    """Whether `text` is `<label>@<64 hex digits>`, and not a label that must be looked up."""
    return _IDENTITY.fullmatch(text) is not None


def label_key(label: str | None, revision: str | None) -> str:
    """How the alias table names a base: a label that comes with a revision is never covered by the bare label's entry."""
    return f"{label}@{revision}" if label and revision else label or ""


def resolve_base(declared_identity: str | None, label: str | None, revision: str | None, matrix: Matrix) -> BaseClaim:
    """The base that the uploader declared, or the one that the alias table gives for the artifact's label.

    :raises BaseUnknown: nothing declared, and the label is in no entry or names several identities; or the declared one is malformed.
    :raises BaseMismatch: the declared base is not among those of the label's entry.
    """
    key = label_key(label, revision)
    known = matrix.labels.get(key, ()) if key else ()
    if declared_identity:
        if not is_identity(declared_identity):
            raise BaseUnknown(
                f"{declared_identity!r} is no base identity; expected <label>@<64 hex digits>",
                label=declared_identity,
                candidates=list(matrix.labels.get(declared_identity, ())),
                command=f"tenantry matrix alias {declared_identity} IDENTITY",
            )
        if known and not any(same_base(declared_identity, identity) for identity in known):
            raise BaseMismatch(
                f"the uploader declares {declared_identity}, the artifact's label {key} stands for {', '.join(known)}",
                expected=list(known),
                got=declared_identity,
                source=Provenance.DECLARED.value,
                label=key,
            )
        return BaseClaim(identity=declared_identity, provenance=Provenance.DECLARED, label=key)
    if len(known) == 1:
        return BaseClaim(identity=known[0], provenance=Provenance.ALIAS, label=key)
    raise _unknown(key, label, known, matrix)


def check(claim: BaseClaim, adapter_digest: str, pool_identity: str, matrix: Matrix) -> None:
    """Returns if the adapter may go on the pool's base: it is the very base claimed, or an entry allows the pair.

    :raises IncompatiblePair: an entry forbids it; that wins over everything.
    :raises BaseMismatch: another base, and no entry allows it.
    """
    entries = [entry for entry in matrix.pairs if _is_about(entry, claim, adapter_digest, pool_identity)]
    for entry in entries:
        if not entry.allowed:
            raise IncompatiblePair(
                f"the compatibility matrix forbids {entry.adapter_digest} on {entry.base}" + (f": {entry.note}" if entry.note else ""),
                adapter=entry.adapter_digest,
                base=entry.base,
                note=entry.note,
            )
    if same_base(claim.identity, pool_identity) or entries:
        return
    source = f"label {claim.label}" if claim.provenance is Provenance.ALIAS else "declared by the uploader"
    raise BaseMismatch(
        f"the adapter is for {claim.identity} ({source}), the pool serves {pool_identity}",
        expected=pool_identity,
        got=claim.identity,
        source=claim.provenance.value,
        label=claim.label,
    )


def same_base(one: str, other: str) -> bool:
    """Whether two identities have one digest; the label before it is only a name."""
    return one.rsplit("@", 1)[-1] == other.rsplit("@", 1)[-1]


def _is_about(entry: PairEntry, claim: BaseClaim, adapter_digest: str, pool_identity: str) -> bool:
    """An entry names an adapter by its digest, or all adapters made for a label by exactly that label[@revision]."""
    names_adapter = entry.adapter_digest == adapter_digest or (claim.label != "" and entry.adapter_digest == claim.label)
    return names_adapter and same_base(entry.base, pool_identity)


def _unknown(key: str, label: str | None, known: tuple[str, ...], matrix: Matrix) -> BaseUnknown:
    if not key:
        return BaseUnknown(
            "the artifact names no base (base_model_name_or_path is empty) and none was declared",
            label="",
            candidates=sorted({identity for identities in matrix.labels.values() for identity in identities})[:20],
            command="tenantry matrix alias LABEL IDENTITY",
        )
    command = f"tenantry matrix alias {key} IDENTITY"
    if known:
        message = f"the label {key} stands for {len(known)} bases; declare one of {', '.join(known)}"
        return BaseUnknown(message, label=key, candidates=list(known), command=command)
    related = {
        identity
        for other, identities in matrix.labels.items()
        if other == label or other.startswith(f"{label}@")
        for identity in identities
    }
    message = f"no base is known by the label {key}; an operator can name it: {command}"
    return BaseUnknown(message, label=key, candidates=sorted(related), command=command)
