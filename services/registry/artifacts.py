"""What an upload is, said from its bytes alone: files, digest, base, verdict, and the one tar that workers fetch.

All of it is CPU and disk work on files in one folder; it runs in a thread, and knows nothing of the bus.
"""

import tarfile
from pathlib import Path

import msgspec

from shared.artifacts.archive import read_bundle
from shared.artifacts.bundle import ArchiveLimits, Bundle
from shared.artifacts.digest import sha256_of_file
from shared.artifacts.normalise import normalise
from shared.artifacts.peft_config import read_config
from shared.artifacts.validate import validate
from shared.contracts.adapters import PoolEntry
from shared.contracts.base import BaseDescription, EngineLimits
from shared.contracts.state import Matrix
from shared.errors import NoFreeSlot
from shared.policy.compatibility import BaseClaim, check, resolve_base


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A version that may be mounted on its pool's base; `archive` is the tar to keep."""

    claim: BaseClaim
    rank: int
    true_bytes: int
    modules: int
    size_bytes: int
    archive: Path
    archive_sha256: str
    archive_bytes: int


def unpack(upload: Path, folder: Path, limit_bytes: int) -> Bundle:
    """The adapter's own files, taken out of whatever archive was sent.

    :raises AdapterRejected: what was sent is no adapter.
    """
    return read_bundle(upload, folder / "source", ArchiveLimits(max_expanded_bytes=limit_bytes))


def claimed_base(bundle: Bundle, explicit_base: str, matrix: Matrix, pool_base: str) -> BaseClaim:
    """The base the artifact is for, if it may go on the pool's: looked up before anything else is checked.

    :raises AdapterRejected: its configuration cannot be read.
    :raises BaseUnknown: :raises BaseMismatch: :raises IncompatiblePair: as shared.policy.compatibility says.
    """
    config = read_config(bundle.config_path)
    claim = resolve_base(explicit_base or None, config.base_model_name_or_path, config.revision, matrix)
    check(claim, bundle.digest, pool_base, matrix)
    return claim


def prepare(bundle: Bundle, claim: BaseClaim, base: BaseDescription, limits: EngineLimits, folder: Path) -> Prepared:
    """Validated, normalised and packed.

    :raises AdapterRejected: with the reason and the field or figure.
    """
    valid = validate(bundle, base, limits)
    normalised = normalise(bundle, valid, base, folder / "normalised")
    archive = folder / "artifact.tar"
    pack(normalised.root, tuple(file.name for file in normalised.files), archive)
    return Prepared(
        claim=claim,
        rank=valid.rank,
        true_bytes=valid.true_bytes,
        modules=valid.modules,
        size_bytes=bundle.size_bytes,
        archive=archive,
        archive_sha256=sha256_of_file(archive),
        archive_bytes=archive.stat().st_size,
    )


def pack(folder: Path, names: tuple[str, ...], archive: Path) -> None:
    """A tar of these files whose bytes depend on their names and contents only."""
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(names):
            info = tarfile.TarInfo(name)
            info.size = (folder / name).stat().st_size
            info.mode = 0o644
            with (folder / name).open("rb") as file:
                tar.addfile(info, file)


def widest_limits(pool: PoolEntry) -> EngineLimits:
    """The limits of the worker that runs the largest rank: what no worker runs is refused at validation.

    :raises NoFreeSlot: the pool has no worker.
    """
    if not pool.workers:
        raise NoFreeSlot(f"pool {pool.pool_id} has no worker", asked_slots=1, held_slots=0, limit_slots=0)
    return max((worker.limits for worker in pool.workers.values()), key=lambda limits: limits.max_rank)
