"""Good artifacts come out the same whatever they were packed in."""

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from shared.artifacts.archive import read_bundle
from shared.artifacts.bundle import ArchiveLimits
from shared.errors import AdapterRejected
from tests.adapter_files import CONFIG, WEIGHTS, pack, tar_bytes
from tests.adapters_factory import make_adapter, make_base

BASE = make_base("moe")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter", BASE)


@pytest.mark.parametrize("top", ["", "sales-tone", "deep/er"])
@pytest.mark.parametrize("kind", ["tar", "tar.gz", "zip"])
def test_every_archive_form_has_the_folders_digest(kind: str, top: str, adapter: Path, tmp_path: Path):
    of_folder = read_bundle(adapter, tmp_path / "a")
    of_archive = read_bundle(pack(adapter, kind, top), tmp_path / "b")
    assert of_archive.digest == of_folder.digest
    assert of_archive.digest.startswith("sha256:")
    assert of_archive.weights_path.read_bytes() == (adapter / WEIGHTS).read_bytes()
    assert [file.name for file in of_archive.files] == [CONFIG, WEIGHTS]


def test_an_archive_on_disk_reads_like_its_bytes(adapter: Path, tmp_path: Path):
    path = tmp_path / "upload"
    path.write_bytes(pack(adapter, "zip"))
    assert read_bundle(path, tmp_path / "a").digest == read_bundle(io.BytesIO(path.read_bytes()), tmp_path / "b").digest


def test_files_that_are_not_the_adapters_do_not_change_the_digest(adapter: Path, tmp_path: Path):
    before = read_bundle(adapter, tmp_path / "a").digest
    for name in ("README.md", "tokenizer.json", "training_args.bin", "optimizer.pt"):
        (adapter / name).write_text("x")
    after = read_bundle(pack(adapter, "tar.gz"), tmp_path / "b")
    assert after.digest == before
    assert after.ignored == ("README.md", "optimizer.pt", "tokenizer.json", "training_args.bin")
    assert sorted(path.name for path in after.root.iterdir()) == [CONFIG, WEIGHTS]


def test_a_chat_template_is_kept_and_counts_in_the_digest(adapter: Path, tmp_path: Path):
    before = read_bundle(adapter, tmp_path / "a").digest
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    after = read_bundle(adapter, tmp_path / "b")
    assert after.digest != before
    assert (after.root / "chat_template.jinja").read_text() == "{{ messages }}"


def test_one_changed_bit_is_another_digest(adapter: Path, tmp_path: Path):
    before = read_bundle(adapter, tmp_path / "a").digest
    raw = bytearray((adapter / WEIGHTS).read_bytes())
    raw[-1] ^= 1
    (adapter / WEIGHTS).write_bytes(raw)
    assert read_bundle(adapter, tmp_path / "b").digest != before


def test_a_trainers_checkpoints_beside_the_adapter_are_left(adapter: Path, tmp_path: Path):
    make_adapter(adapter / "checkpoint-500", BASE, seed=1)
    assert read_bundle(adapter, tmp_path / "a").ignored == ()


def test_a_folder_of_one_adapter_folder_is_read(adapter: Path, tmp_path: Path):
    make_adapter(tmp_path / "outer" / "inner", BASE)
    assert read_bundle(tmp_path / "outer", tmp_path / "a").digest == read_bundle(adapter, tmp_path / "b").digest


def test_a_hub_snapshot_of_links_is_read_when_its_owner_says_so(adapter: Path, tmp_path: Path):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in adapter.iterdir():
        (snapshot / file.name).symlink_to(file)
    followed = read_bundle(snapshot, tmp_path / "a", ArchiveLimits(follow_links=True))
    assert followed.digest == read_bundle(adapter, tmp_path / "b").digest
    assert not any(path.is_symlink() for path in followed.root.iterdir())


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "zip", "folder"])
def test_the_limit_on_expanded_bytes_holds_whatever_headers_say(kind: str, adapter: Path, tmp_path: Path):
    source = adapter if kind == "folder" else pack(adapter, kind)
    with pytest.raises(AdapterRejected) as refusal:
        read_bundle(source, tmp_path / "a", ArchiveLimits(max_expanded_bytes=4000))
    assert refusal.value.fields == {"reason": "archive_bomb", "limit_bytes": 4000}


def test_a_header_that_would_fill_memory_is_refused(tmp_path: Path):
    info = tarfile.TarInfo("x")
    info.type = tarfile.GNUTYPE_LONGNAME
    info.size = 32 << 20
    raw = info.tobuf(tarfile.GNU_FORMAT) + bytes(32 << 20)
    with pytest.raises(AdapterRejected) as refusal:
        read_bundle(gzip.compress(raw), tmp_path / "a")
    assert refusal.value.fields["reason"] == "archive_bomb"


def test_long_names_are_fine(adapter: Path, tmp_path: Path):
    members = {f"{'long' * 60}/{file.name}": file.read_bytes() for file in adapter.iterdir()}
    assert read_bundle(tar_bytes(members), tmp_path / "a").digest == read_bundle(adapter, tmp_path / "b").digest


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "zip"])
def test_an_archive_cut_anywhere_is_never_taken(kind: str, adapter: Path, tmp_path: Path):
    whole = pack(adapter, kind)
    needed = len(whole) if kind != "tar" else len(whole.rstrip(b"\0"))
    for step in range(1, 40):
        with pytest.raises(AdapterRejected):
            read_bundle(whole[: needed * step // 40], tmp_path / str(step))


def test_damage_in_the_middle_of_a_gzip_is_seen(adapter: Path, tmp_path: Path):
    raw = bytearray(pack(adapter, "tar.gz"))
    raw[-6] ^= 0xFF
    with pytest.raises(AdapterRejected) as refusal:
        read_bundle(bytes(raw), tmp_path / "a")
    assert refusal.value.fields["reason"] == "bad_archive"
