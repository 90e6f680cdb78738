"""The run directory: what may be opened, who owns it, what survives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from palestra.errors import RecordError
from palestra.records.folder import NewerSchemaError, RunFolder
from palestra.records.reader import RunReader

HOLD = """
import sys, time
from pathlib import Path
from palestra.records.folder import RunFolder
run = RunFolder.open(Path(sys.argv[1]), create=True)
run.lock()
print("held", flush=True)
time.sleep(60)
"""


def hold(path: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def test_a_new_run_is_created_and_opened_again(tmp_path: Path) -> None:
    made = RunFolder.open(tmp_path / "runs" / "a", create=True)
    again = RunFolder.open(tmp_path / "runs" / "a", create=False)
    assert made.info == again.info
    assert again.info["schema"] == 1
    assert again.info["name"] == "a"
    assert again.attempt == 0


def test_an_unknown_run_names_the_nearest_one_beside_it(tmp_path: Path) -> None:
    RunFolder.open(tmp_path / "arithmetic", create=True)
    with pytest.raises(RecordError) as caught:
        RunFolder.open(tmp_path / "aritmetic", create=False)
    assert caught.value.nearest == "arithmetic"
    assert caught.value.next_command == "palestra runs list"
    assert not (tmp_path / "aritmetic").exists()


def test_a_foreign_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    for create in (True, False):
        with pytest.raises(RecordError):
            RunFolder.open(tmp_path, create=create)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_refusal_of_a_foreign_folder_names_what_is_in_it(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d", "e"):
        (tmp_path / name).touch()
    with pytest.raises(RecordError, match="a, b, c and 2 more"):
        RunFolder.open(tmp_path, create=True)


def test_a_file_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RecordError, match="is a file"):
        RunFolder.open(tmp_path / "run", create=True)


def test_an_empty_folder_becomes_a_run(tmp_path: Path) -> None:
    assert RunFolder.open(tmp_path, create=True).info["status"] == "new"


def test_a_creation_that_was_killed_is_finished_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".run.json.4711.tmp").write_text('{"schema"')
    (tmp_path / "run.lock").touch()
    run = RunFolder.open(tmp_path, create=True)
    assert run.begin_attempt({}, {}, {}) == 1
    assert not (tmp_path / ".run.json.4711.tmp").exists()
    run.unlock()


def test_a_newer_schema_is_refused_with_the_way_out(tmp_path: Path) -> None:
    RunFolder.open(tmp_path, create=True)
    (tmp_path / "run.json").write_text(json.dumps({"schema": 2}))
    with pytest.raises(NewerSchemaError, match="schema 2") as caught:
        RunFolder.open(tmp_path, create=True)
    assert "upgrade" in caught.value.next_command


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"schema":"x"}', b"[" * 100_000])
def test_a_damaged_run_json_is_named_and_not_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(RecordError, match="damaged"):
        RunFolder.open(tmp_path, create=True)
    assert (tmp_path / "run.json").read_bytes() == content


def test_update_keeps_unknown_fields_and_is_seen_by_others(folder: RunFolder) -> None:
    folder.update(model="tiny", future={"a": [1, float("inf")]})
    folder.update(steps=7)
    info = RunFolder.open(folder.path, create=False).info
    assert (info["model"], info["steps"], info["future"]) == ("tiny", 7, {"a": [1, "Infinity"]})


def test_identity_and_schema_cannot_be_updated(folder: RunFolder) -> None:
    with pytest.raises(RecordError, match="id, schema"):
        folder.update(schema=2, id="other")
    assert folder.info["schema"] == 1


def test_an_unknown_status_is_refused_with_the_nearest(folder: RunFolder) -> None:
    with pytest.raises(RecordError) as caught:
        folder.set_status("finishd")
    assert caught.value.nearest == "finished"


def test_attempts_are_numbered_and_keep_their_own_configuration(tmp_path: Path) -> None:
    run = RunFolder.open(tmp_path, create=True)
    assert [run.begin_attempt({"n": n}, {"lr": n / 8}, {}) for n in (1, 2, 3)] == [1, 2, 3]
    run.unlock()
    first = json.loads((tmp_path / "config" / "attempt_1" / "launch.json").read_text())
    last = json.loads((tmp_path / "config" / "attempt_3" / "resolved.json").read_text())
    assert (first, last) == ({"n": 1}, {"lr": 0.375})
    assert (tmp_path / "logs" / "attempt_2").is_dir()
    assert RunFolder.open(tmp_path, create=False).attempt == 3


def test_an_attempt_that_was_killed_before_it_was_announced_keeps_its_number(tmp_path: Path) -> None:
    run = RunFolder.open(tmp_path, create=True)
    (tmp_path / "config" / "attempt_1").mkdir(parents=True)
    (tmp_path / "config" / ".attempt_2").mkdir()
    assert run.begin_attempt({}, {}, {}) == 2
    run.unlock()


def test_a_second_holder_is_refused_and_told_who_holds(tmp_path: Path) -> None:
    child = hold(tmp_path / "mine")
    try:
        run = RunFolder.open(tmp_path / "mine", create=False)
        with pytest.raises(RecordError) as caught:
            run.begin_attempt({}, {}, {})
        assert f"process {child.pid} " in caught.value.what
        assert caught.value.next_command == "palestra runs show mine"
        assert run.info["attempt"] == 0
    finally:
        child.kill()
        child.wait()


def test_the_lock_ends_with_its_holder_even_by_kill_9(tmp_path: Path) -> None:
    child = hold(tmp_path / "mine")
    child.send_signal(signal.SIGKILL)
    child.wait()
    run = RunFolder.open(tmp_path / "mine", create=False)
    run.lock()
    run.lock()  # holding twice is holding
    run.unlock()
    run.unlock()


def test_two_handles_in_one_process_exclude_each_other(tmp_path: Path) -> None:
    first, second = (RunFolder.open(tmp_path, create=True) for _ in range(2))
    first.lock()
    with pytest.raises(RecordError, match=f"process {os.getpid()} "):
        second.lock()
    first.unlock()
    second.lock()
    second.unlock()


def test_a_forked_child_does_not_keep_the_lock_of_its_dead_parent(tmp_path: Path) -> None:
    code = HOLD.replace('print("held", flush=True)', "import os\nchild = os.fork()\n").replace(
        "time.sleep(60)",
        "if child:\n    print(child, flush=True)\n    os.kill(os.getpid(), 9)\ntime.sleep(60)",
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    orphan = int(parent.stdout.readline())
    try:
        parent.wait()
        os.kill(orphan, 0)
        run = RunFolder.open(tmp_path, create=False)
        # The child closes its copy as the first thing it does; its parent may have died before that.
        deadline = time.monotonic() + 20
        while True:
            try:
                run.lock()
                break
            except RecordError:
                assert time.monotonic() < deadline, "the child still holds the lock"
                time.sleep(0.01)
        run.unlock()
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_readers_never_see_a_half_written_run_json(folder: RunFolder) -> None:
    stop = threading.Event()

    def keep_updating() -> None:
        count = 0
        while not stop.is_set():
            folder.update(padding="x" * (count % 5000), count=count)
            count += 1

    thread = threading.Thread(target=keep_updating)
    thread.start()
    try:
        reader = RunReader(folder.path)
        assert all(reader.info().get("schema") == 1 for _ in range(200))
    finally:
        stop.set()
        thread.join()


def test_an_unwritable_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="creating the run's folder failed"):
        RunFolder.open(tmp_path / "file" / "run", create=True)
