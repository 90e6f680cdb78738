"""Alive or gone: from the process table where it can be asked, from the beat's age elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from palestra.records import heartbeat
from palestra.records.folder import RunFolder
from palestra.records.reader import RunReader

RUN = """
import sys, time
from pathlib import Path
from palestra.records.folder import RunFolder
run = RunFolder.open(Path(sys.argv[1]), create=True)
print(run.begin_attempt({}, {}, {}), flush=True)
time.sleep(60)
"""


def beating(path: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", RUN, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "1\n"
    return child


def abroad(path: Path, *, age_s: float) -> None:
    """Make the run look as if it ran on another machine, with its last beat ``age_s`` ago."""
    info = json.loads((path / "run.json").read_text())
    info["owner"] |= {"place": "other-boot/pid:[1]", "host": "node7"}
    (path / "run.json").write_text(json.dumps(info))
    (path / "heartbeat").write_text(json.dumps({"t": time.time() - age_s}))


def test_a_killed_run_is_lost_at_once_and_a_live_one_running(tmp_path: Path) -> None:
    """Aim#2869: killed runs stayed "in progress" for ever."""
    child = beating(tmp_path / "r")
    reader = RunReader(tmp_path / "r")
    try:
        assert reader.state() == ("running", "")
    finally:
        child.kill()
    # Even before anyone collected it: a zombie no longer owns its run.
    deadline = time.monotonic() + 20
    while reader.state().state == "running" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert reader.state().state == "lost"
    assert f"process {child.pid}" in reader.state().reason
    child.wait()


@pytest.mark.parametrize(
    ("status", "state"),
    [("finished", "finished"), ("failed", "failed"), ("stopped", "stopped"), ("running", "running")],
)
def test_the_state_is_the_status_with_its_reason(folder: RunFolder, status: str, state: str) -> None:
    folder.set_status(status, "because")
    assert RunReader(folder.path).state() == (state, "because")


def test_a_run_that_never_started_is_empty(tmp_path: Path) -> None:
    RunFolder.open(tmp_path, create=True)
    assert RunReader(tmp_path).state().state == "empty"


def test_a_reused_process_id_is_not_the_owner(folder: RunFolder) -> None:
    info = json.loads((folder.path / "run.json").read_text())
    info["owner"]["start"] = "1"  # this process's id, but of one that started at boot
    (folder.path / "run.json").write_text(json.dumps(info))
    assert RunReader(folder.path).state().state == "lost"


def test_seen_from_another_machine_the_beat_decides(folder: RunFolder) -> None:
    folder._stop_heart()
    abroad(folder.path, age_s=1)
    assert RunReader(folder.path).state().state == "running"
    abroad(folder.path, age_s=300)
    state, reason = RunReader(folder.path).state()
    assert state == "lost"
    assert reason.startswith("no heartbeat from process")
    assert "node7" in reason


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"t": "yesterday"}', b"\xff"])
def test_an_unreadable_beat_is_no_beat(folder: RunFolder, content: bytes) -> None:
    folder._stop_heart()
    abroad(folder.path, age_s=0)
    (folder.path / "heartbeat").write_bytes(content)
    assert RunReader(folder.path).state().state == "lost"


def test_a_copy_of_a_dead_run_is_not_revived_by_its_new_file_times(folder: RunFolder, tmp_path: Path) -> None:
    folder._stop_heart()
    abroad(folder.path, age_s=300)
    shutil.copytree(folder.path, tmp_path / "copy", copy_function=shutil.copyfile)
    assert RunReader(tmp_path / "copy").state().state == "lost"


def test_small_clock_differences_are_no_death_and_large_ones_are_told() -> None:
    who: dict[str, Any] = {"pid": 1, "host": "h", "place": "elsewhere"}
    assert heartbeat.trouble(who, {"t": 1000.0}, now=990.0) == ""
    assert heartbeat.trouble(who, {"t": 1000.0}, now=1020.0) == ""
    assert heartbeat.trouble(who, {"t": 1000.0}, now=2000.0) == "no heartbeat from process 1 on h for 1000 s"
    assert heartbeat.trouble(who, {"t": 9000.0}, now=1000.0) != ""
    assert heartbeat.trouble({}, None) != ""


def test_the_beat_goes_on_and_is_always_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.005)
    beat = heartbeat.Heartbeat(tmp_path / "heartbeat", 3)
    beat.start()
    seen: set[float] = set()
    deadline = time.monotonic() + 30
    while len(seen) < 5 and time.monotonic() < deadline:
        found = heartbeat.read_beat(tmp_path / "heartbeat")
        assert found is not None
        assert (found["pid"], found["attempt"]) == (os.getpid(), 3)
        seen.add(found["t"])
    beat.stop()
    assert len(seen) == 5


def test_an_unknown_process_has_no_start() -> None:
    assert heartbeat.start_ticks(2**30) == ""
    assert heartbeat.start_ticks(os.getpid()).isdigit()
