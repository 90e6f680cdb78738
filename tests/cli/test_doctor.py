"""`palestra doctor`: what is found is told apart, and what is missing has a next command."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from palestra.cli import doctor
from palestra.cli.doctor import GIB, Check, available_memory, checks, disk, extra, memory
from palestra.cli.main import main
from palestra.errors import IsolationUnavailable
from palestra.sandboxes import bubblewrap


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))


class Usage(NamedTuple):
    total: int
    used: int
    free: int


class IsolatingHost:
    def probe(self) -> None:
        return None


class RefusingHost:
    def probe(self) -> None:
        raise IsolationUnavailable(
            "user namespaces are off",
            expected="kernel.unprivileged_userns_clone = 1",
            next_command="sysctl -w it=1",
        )


class CrashingHost:
    def probe(self) -> None:
        raise OSError("no /proc here")


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine on which every check is ok: each test breaks one thing."""
    monkeypatch.setattr(bubblewrap, "BubblewrapHost", IsolatingHost)
    monkeypatch.setattr(doctor, "available_memory", lambda: 16 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100 * GIB, 0, 50 * GIB))
    monkeypatch.setattr(doctor, "number_type", lambda: Check("number type", "ok", "fp32 is the faster one"))
    return monkeypatch


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["doctor", *words])
    return code, capsys.readouterr().out


def test_a_machine_with_everything_is_told_to_start(
    healthy: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown = run(capsys)
    assert code == 0
    assert shown.rstrip().endswith("this machine can run the quick start: palestra quickstart")
    assert "fail" not in shown


def test_json_holds_every_check(healthy: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = run(capsys, "--json")
    found = json.loads(shown)
    assert (code, found["ok"]) == (0, True)
    names = [check["name"] for check in found["checks"]]
    extras, machine = ["extra torch", "extra hub"], ["processor", "number type", "memory", "disk"]
    assert names == ["python", *extras, *machine, "sandbox", "model cache"]
    assert all(check["status"] in ("ok", "warn", "fail") for check in found["checks"])


def test_without_isolation_it_fails_and_offers_the_task_that_needs_none(
    healthy: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    healthy.setattr(bubblewrap, "BubblewrapHost", RefusingHost)
    code, shown = run(capsys)
    assert code == 3
    assert "fail  sandbox" in shown
    assert "user namespaces are off kernel.unprivileged_userns_clone = 1" in shown
    assert "next: sysctl -w it=1; or: palestra quickstart --task expressions" in shown
    assert "1 of 9 must be mended" in shown


def test_one_check_that_cannot_look_hides_no_other(
    healthy: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    healthy.setattr(bubblewrap, "BubblewrapHost", CrashingHost)
    code, shown = run(capsys, "--json")
    found = {check["name"]: check for check in json.loads(shown)["checks"]}
    assert code == 3
    assert found["sandbox"]["found"] == "could not look: OSError: no /proc here"
    assert found["model cache"]["status"] == "ok"


def test_a_missing_extra_fails_only_where_the_quick_start_needs_it(healthy: pytest.MonkeyPatch) -> None:
    healthy.setitem(doctor.EXTRAS, "torch", ("json", "no_such_module_a", "no_such_module_b"))
    healthy.setitem(doctor.EXTRAS, "hub", ("no_such_module",))
    needed, optional = extra("torch", needed=True), extra("hub", needed=False)
    assert needed == Check(
        "extra torch", "fail", "missing: no_such_module_a, no_such_module_b", "pip install 'palestra[torch]'"
    )
    assert optional.status == "warn"
    assert "pip install 'palestra[hub]'" in optional.next


@pytest.mark.parametrize(
    ("available", "status"), [(16 * GIB, "ok"), (8 * GIB, "ok"), (5 * GIB, "warn"), (None, "warn")]
)
def test_little_memory_is_a_warning(available: int | None, status: str) -> None:
    assert memory(available).status == status


def test_available_memory_is_a_number_of_bytes_on_this_machine() -> None:
    found = available_memory()
    assert found is not None
    assert 2**20 < found < 2**50


@pytest.mark.parametrize(("free", "status"), [(50 * GIB, "ok"), (3 * GIB, "warn"), (GIB // 2, "fail")])
def test_disk_space_is_judged_where_runs_would_lie(
    healthy: pytest.MonkeyPatch, tmp_path: Path, free: int, status: str
) -> None:
    looked: list[Path] = []

    def usage(place: Path) -> Usage:
        looked.append(place)
        return Usage(100 * GIB, 0, free)

    healthy.setattr(shutil, "disk_usage", usage)
    assert disk(Path("not/yet/there")).status == status
    assert looked == [tmp_path]
    assert not Path("not").exists()


def test_a_folder_that_cannot_be_written_fails(healthy: pytest.MonkeyPatch) -> None:
    healthy.setattr(os, "access", lambda *_: False)
    found = disk(Path("runs"))
    assert found.status == "fail"
    assert "cannot be written" in found.found
    assert "runs_dir" in found.next


def test_looking_changes_nothing(healthy: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    checks(Path("runs"))
    assert sorted(tmp_path.rglob("*")) == before


def test_every_finding_that_is_not_ok_has_something_to_do_next(healthy: pytest.MonkeyPatch) -> None:
    healthy.setattr(bubblewrap, "BubblewrapHost", RefusingHost)
    healthy.setattr(doctor, "available_memory", lambda: GIB)
    healthy.setattr(shutil, "disk_usage", lambda _: Usage(GIB, 0, GIB // 2))
    healthy.setitem(doctor.EXTRAS, "torch", ("no_such_module",))
    healthy.setitem(doctor.EXTRAS, "hub", ("no_such_module",))
    found: list[Any] = [check for check in checks(Path("runs")) if check.status != "ok"]
    assert len(found) >= 5
    assert all(check.next for check in found if check.name != "processor")
