"""Labels are looked up exactly, identities decide, and what is not known is refused."""

import pytest

from shared.contracts.state import Matrix, PairEntry, Provenance
from shared.errors import BaseMismatch, BaseUnknown, IncompatiblePair
from shared.policy.compatibility import BaseClaim, check, is_identity, resolve_base

NOW = "demo@" + "a" * 64
OLD = "demo@" + "b" * 64
LABEL = "tenantry/qwen3-moe-demo"
DIGEST = "sha256:" + "1" * 64
MATRIX = Matrix(labels={LABEL: (NOW,), f"{LABEL}@v0": (OLD,), "twice": (NOW, OLD)})


def claim(identity: str = NOW, label: str = LABEL, provenance: Provenance = Provenance.ALIAS) -> BaseClaim:
    return BaseClaim(identity=identity, provenance=provenance, label=label)


def pair(adapter: str = DIGEST, base: str = NOW, *, allowed: bool) -> Matrix:
    return Matrix(labels=MATRIX.labels, pairs=(PairEntry(adapter_digest=adapter, base=base, allowed=allowed, note="measured"),))


@pytest.mark.parametrize(
    ("declared", "label", "revision", "expected"),
    [
        (None, LABEL, None, claim()),
        (None, LABEL, "v0", claim(OLD, f"{LABEL}@v0")),
        (NOW, LABEL, None, claim(provenance=Provenance.DECLARED)),
        (NOW, "/home/me/base", None, claim(NOW, "/home/me/base", Provenance.DECLARED)),
        (OLD, "twice", None, claim(OLD, "twice", Provenance.DECLARED)),
        (NOW, None, None, claim(NOW, "", Provenance.DECLARED)),
        ("other-name@" + "a" * 64, LABEL, None, claim("other-name@" + "a" * 64, LABEL, Provenance.DECLARED)),
    ],
)
def test_a_base_is_the_declared_one_or_the_labels_only_entry(declared, label, revision, expected):
    assert resolve_base(declared, label, revision, MATRIX) == expected


@pytest.mark.parametrize(
    ("label", "revision", "candidates"),
    [
        ("qwen3-moe-demo", None, []),
        (LABEL.upper(), None, []),
        ("twice", None, [NOW, OLD]),
        (LABEL, "v9", [NOW, OLD]),
        ("twice", "v0", [NOW, OLD]),
        (None, None, [NOW, OLD]),
        ("", "v0", [NOW, OLD]),
    ],
)
def test_an_unknown_or_ambiguous_label_is_refused_with_candidates_and_the_command(label, revision, candidates):
    with pytest.raises(BaseUnknown) as refusal:
        resolve_base(None, label, revision, MATRIX)
    assert refusal.value.fields["candidates"] == candidates
    assert refusal.value.fields["command"].startswith("tenantry matrix alias ")


def test_a_bare_label_never_covers_a_revision():
    bare = Matrix(labels={LABEL: (NOW,)})
    with pytest.raises(BaseUnknown) as refusal:
        resolve_base(None, LABEL, "v0", bare)
    assert refusal.value.fields["label"] == f"{LABEL}@v0"
    assert refusal.value.fields["command"] == f"tenantry matrix alias {LABEL}@v0 IDENTITY"


def test_a_declared_base_that_contradicts_the_label_is_refused():
    with pytest.raises(BaseMismatch) as refusal:
        resolve_base(OLD, LABEL, None, MATRIX)
    assert refusal.value.fields["expected"] == [NOW]
    assert refusal.value.fields["got"] == OLD


@pytest.mark.parametrize("text", ["demo", "demo@abc", "demo@" + "A" * 64, "@" + "a" * 64, "a b@" + "a" * 64])
def test_a_malformed_identity_is_no_base(text: str):
    assert not is_identity(text)
    with pytest.raises(BaseUnknown):
        resolve_base(text, None, None, MATRIX)


def test_the_very_base_is_compatible_whatever_it_is_called():
    check(claim("renamed@" + "a" * 64), DIGEST, NOW, MATRIX)


def test_the_adapter_made_for_another_revision_is_refused():
    old = resolve_base(None, LABEL, "v0", MATRIX)
    with pytest.raises(BaseMismatch) as refusal:
        check(old, DIGEST, NOW, MATRIX)
    assert refusal.value.fields == {"expected": NOW, "got": OLD, "source": "alias", "label": f"{LABEL}@v0"}


@pytest.mark.parametrize("adapter", [DIGEST, f"{LABEL}@v0"])
def test_an_entry_may_allow_another_base(adapter: str):
    check(claim(OLD, f"{LABEL}@v0"), DIGEST, NOW, pair(adapter, allowed=True))


@pytest.mark.parametrize(
    "matrix",
    [
        pair("sha256:" + "2" * 64, allowed=True),
        pair(LABEL, allowed=True),
        pair(DIGEST, "demo@" + "c" * 64, allowed=True),
    ],
)
def test_an_entry_for_another_adapter_label_or_base_allows_nothing(matrix: Matrix):
    with pytest.raises(BaseMismatch):
        check(claim(OLD, f"{LABEL}@v0"), DIGEST, NOW, matrix)


def test_a_refusal_in_the_matrix_wins_over_the_exact_base_and_over_a_permission():
    both = Matrix(pairs=(*pair(allowed=True).pairs, *pair(LABEL, allowed=False).pairs))
    with pytest.raises(IncompatiblePair) as refusal:
        check(claim(), DIGEST, NOW, both)
    assert refusal.value.fields["note"] == "measured"
