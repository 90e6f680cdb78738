"""A full disk: durable entries say so and can be repeated, everything else is counted, the run goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from palestra.errors import RecordError
from palestra.records.folder import RunFolder
from palestra.records.reader import RunReader
from palestra.records.writer import RunWriter


def test_a_full_disk_never_raises_into_the_run_and_loses_nothing_durable(
    small_disk: Any, trajectory: Any
) -> None:
    run = RunFolder.open(small_disk.path / "r", create=True)
    run.begin_attempt({}, {}, {})
    writer = RunWriter(run)
    seen: list[str] = []
    writer.subscribe(lambda record: seen.append(record["type"]))
    writer.metrics({"a": 1.0}, step=1, version=0)
    writer.ledger({"kind": "draws", "step": 1})
    assert writer.flush()
    small_disk.fill()

    with pytest.raises(RecordError) as caught:
        for step in range(2, 100):
            writer.ledger({"kind": "draws", "step": step, "padding": "x" * 2000})
    assert "writing the ledger failed: No space left on device" in caught.value.what
    assert str(run.path) in caught.value.where
    assert "MB free" in caught.value.where
    assert "run the same command" in caught.value.next_command
    written = len(RunReader(run.path).ledger())

    for step in range(2, 200):
        writer.metrics({"padding" * 50: 1.0}, step=step, version=0)
        writer.rollout(
            trajectory(tokens=200),
            group_id="g",
            step=step,
            task_id="t",
            reply_text="x" * 500,
            prompt_text="",
            split="train",
            advantage=0.5,
        )
    assert writer.flush()
    assert writer.dropped > 0
    assert "No space left" in (writer.degraded or "")
    assert seen.count("metrics") == 199  # the panel goes on
    with pytest.raises(RecordError, match=r"updating run\.json failed"):
        run.update(padding="x" * 20_000)

    small_disk.free()
    writer.ledger({"kind": "draws", "step": "after"})
    writer.metrics({"a": 2.0}, step=500, version=0)
    writer.rollout(
        trajectory("late"),
        group_id="g",
        step=500,
        task_id="t",
        reply_text="",
        prompt_text="",
        split="train",
        advantage=0.5,
    )
    lost = writer.dropped
    writer.close()
    run.set_status("finished")
    run.unlock()

    reader = RunReader(run.path)
    assert len(reader.ledger()) == written + 1
    assert reader.ledger()[-1]["step"] == "after"
    assert reader.metrics()[-1]["step"] == 500
    assert len(reader.metrics()) + len(reader.rollouts()) + lost == 199 + 199 + 1
    assert all(len(reader.tokens(r)) for r in reader.rollouts())
    assert reader.rollouts()[-1]["id"] == "late"
    assert reader.events("dropped")[-1]["fields"]["count"] == lost
    assert not reader.skipped


LIMITED = """
import resource, sys
from pathlib import Path
from palestra.errors import RecordError
from palestra.records.folder import RunFolder
from palestra.records.writer import RunWriter
run = RunFolder.open(Path(sys.argv[1]), create=True)
run.begin_attempt({}, {}, {})
writer = RunWriter(run)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
done = 0
try:
    while True:
        writer.ledger({"kind": "draws", "step": done + 1, "padding": "x" * 777})
        done += 1
except RecordError as error:
    print(done)
    print(error.what)
for step in range(200):
    writer.metrics({"m" * 400: 1.0}, step=step, version=0)
writer.close()
print(writer.dropped)
"""


def test_a_file_size_limit_is_handled_like_a_full_disk(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "r")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    count, what, dropped = done.stdout.splitlines()
    assert what == "writing the ledger failed: File too large"
    reader = RunReader(tmp_path / "r")
    assert [e["step"] for e in reader.ledger()] == list(range(1, int(count) + 1))
    assert len(reader.metrics()) + int(dropped) == 200
    assert int(dropped) > 0
    content = (tmp_path / "r" / "ledger" / "attempt-1.jsonl").read_bytes()
    assert content.endswith(b"\n"), "a failed append was not cut off"
