"""The folder in which uploads are unpacked."""

from pathlib import Path

import pytest

from services.registry.workspace import emptied
from shared.errors import StartFailed


def test_it_is_ours_alone_and_empty_before_and_after(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    (folder / "left").mkdir(parents=True)
    (folder / "over").write_bytes(b"1")
    folder.chmod(0o777)
    with emptied(folder) as made:
        assert list(made.iterdir()) == []
        assert made.stat().st_mode & 0o777 == 0o700
        (made / "new").write_bytes(b"1")
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_its_place_is_refused_and_what_it_points_to_is_left(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_bytes(b"1")
    (tmp_path / "work").symlink_to(elsewhere)
    with pytest.raises(StartFailed, match="link"), emptied(tmp_path / "work"):
        raise AssertionError("never entered")
    assert (elsewhere / "precious").exists()


def test_what_a_killed_registry_left_goes_and_a_living_ones_stays(tmp_path: Path) -> None:
    killed = tmp_path / "tenantry-killed"
    killed.mkdir()
    (killed / "upload").write_bytes(b"1")
    (tmp_path / "tenantry-killed.lock").touch()
    strange = tmp_path / "tenantry-somebody-elses"
    strange.mkdir()
    with emptied(tmp_path / "tenantry-living") as living:
        (living / "upload").write_bytes(b"1")
        with emptied(tmp_path / "tenantry-new"):
            assert not killed.exists()
            assert (living / "upload").exists()
            assert strange.exists()
    assert list(tmp_path.iterdir()) == [strange]


def test_two_registries_of_one_name_cannot_share_it(tmp_path: Path) -> None:
    with emptied(tmp_path / "tenantry-one") as first:
        (first / "upload").write_bytes(b"1")
        with pytest.raises(StartFailed, match="another registry"), emptied(tmp_path / "tenantry-one"):
            raise AssertionError("never entered")
        assert (first / "upload").exists()
