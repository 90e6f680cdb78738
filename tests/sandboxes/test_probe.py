"""The probe's verdict: one wall that does not hold, or one answer that is missing, and nothing may run."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from helpers.sandbox_modes import here_or_skip
from palestra.errors import IsolationUnavailable, SandboxError
from palestra.sandboxes import bubblewrap, limits, probe, seccomp
from palestra.sandboxes.base import ExecResult, ExecStatus, SandboxSpec
from palestra.sandboxes.bubblewrap import BubblewrapHost
from palestra.sandboxes.probe import MUST_FAIL, PROBE_SPEC, Canary, judge, remedy


def good() -> dict[str, Any]:
    report: dict[str, Any] = {name: {"worked": False, "error": "EPERM"} for name in MUST_FAIL}
    return {
        **report,
        "uid": 65534,
        "environment": [],
        "seen": {},
        "scratch": {"worked": True, "value": None},
        "interfaces": {"worked": True, "value": ["lo"]},
        "processes": {"worked": True, "value": {"children": PROBE_SPEC.processes - 1, "error": "EAGAIN"}},
    }


def result(report: dict[str, Any]) -> ExecResult:
    return ExecResult(ExecStatus.EXITED, 0, None, json.dumps(report).encode(), b"", False, 0.1)


def test_a_machine_on_which_every_wall_holds_passes() -> None:
    judge(result(good()), None)
    report = {**good(), "seen": {"/root": [".pyenv"]}}
    judge(result(report), Path("/root/.pyenv/versions/3.12"))


@pytest.mark.parametrize("name", MUST_FAIL)
def test_each_wall_that_does_not_hold_is_named(name: str) -> None:
    report = {**good(), name: {"worked": True, "value": None}}
    with pytest.raises(IsolationUnavailable, match=MUST_FAIL[name].replace("(", ".")):
        judge(result(report), None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"uid": 0}, "uid 0"),
        ({"seen": {"/home": ["me"]}}, "/home: me"),
        ({"seen": {"/proc": ["1"]}}, "/proc: 1"),
        ({"interfaces": {"worked": True, "value": ["lo", "eth0"]}}, "eth0"),
        ({"scratch": {"worked": False, "error": "EROFS"}}, "not writable"),
        ({"processes": {"worked": True, "value": {"children": 64, "error": ""}}}, "process limit 3"),
        ({"processes": {"worked": True, "value": {"children": 0, "error": "EAGAIN"}}}, "process limit 3"),
        ({"processes": {"worked": False, "error": "EPERM"}}, "process limit 3"),
    ],
)
def test_each_other_leak_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(IsolationUnavailable, match=words):
        judge(result({**good(), **change}), None)


def test_a_probe_without_an_answer_is_no_pass() -> None:
    silent = ExecResult(ExecStatus.SIGNALED, None, 9, b"", b"killed", False, 0.1)
    with pytest.raises(IsolationUnavailable) as caught:
        judge(silent, None)
    assert "killed" in str(caught.value)


def test_the_remedy_names_the_switch_that_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    switch = tmp_path / "restrict"
    switch.write_text("1\n")
    monkeypatch.setattr(probe, "_SWITCHES", ((str(switch), "1", "sysctl -w x=0"),))
    error = remedy(SandboxError("bubblewrap failed", detail="no permission"))
    assert error.next_command == "sysctl -w x=0"
    assert error.detail == "no permission"
    switch.write_text("0\n")
    assert remedy(SandboxError("bubblewrap failed")).next_command == "palestra doctor"


def test_the_canary_is_gone_after_the_probe() -> None:
    with Canary() as canary:
        question = json.loads(canary.question())
        assert Path(question["marker"]).exists()
    assert not Path(question["marker"]).exists()


@pytest.mark.parametrize(
    ("limit", "words"),
    [("AS", "memory limit"), ("NPROC", "process limit"), ("FSIZE", "")],
)
def test_the_probe_finds_a_limit_that_is_not_set(
    monkeypatch: pytest.MonkeyPatch, limit: str, words: str
) -> None:
    """The walls are really tried: take one away, and the real probe says so."""
    here_or_skip()

    def without(spec: SandboxSpec, *, source_bytes: int = 0) -> dict[str, tuple[int, int]]:
        found = limits.resource_limits(spec, source_bytes=source_bytes)
        del found[limit]
        return found

    monkeypatch.setattr(bubblewrap, "resource_limits", without)
    if not words:
        BubblewrapHost().probe()  # the size of /tmp bounds a file as well
        return
    with pytest.raises(IsolationUnavailable, match=words):
        BubblewrapHost().probe()


def test_the_probe_finds_a_filter_that_lets_vsock_through(monkeypatch: pytest.MonkeyPatch) -> None:
    here_or_skip()
    monkeypatch.setattr(seccomp, "ALLOWED_FAMILIES", (1, 2, 10, 40))
    try:
        socket.socket(40, socket.SOCK_STREAM).close()
    except OSError as error:
        pytest.skip(f"this kernel opens no AF_VSOCK socket: {error}")
    with pytest.raises(IsolationUnavailable, match="AF_VSOCK"):
        BubblewrapHost().probe()


def test_the_probe_finds_a_shared_network(monkeypatch: pytest.MonkeyPatch) -> None:
    here_or_skip()
    shared = [word for word in bubblewrap.NAMESPACES if word != "--unshare-net"]
    monkeypatch.setattr(bubblewrap, "NAMESPACES", shared)
    with pytest.raises(IsolationUnavailable, match="the host's loopback was reachable"):
        BubblewrapHost().probe()


def test_the_probe_finds_a_visible_host(monkeypatch: pytest.MonkeyPatch) -> None:
    here_or_skip()
    host = BubblewrapHost()
    bwrap, python, arguments = host.parts()
    host._parts = (bwrap, python, [*arguments, "--ro-bind", "/proc", "/proc"])
    with pytest.raises(IsolationUnavailable, match="the sandbox held /proc"):
        host.probe()
