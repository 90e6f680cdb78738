"""``kill -9`` at any moment leaves a readable run, and the next attempt goes on beside it."""

from __future__ import annotations

import hashlib
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from palestra.records.folder import RunFolder
from palestra.records.reader import RunReader

# Says on stdout what it was promised: the ledger entries that returned and the metrics that were flushed.
WRITER = """
import itertools, sys, time
from pathlib import Path
from palestra.records.folder import RunFolder
from palestra.records.writer import RunWriter
from palestra.types import Completion, Reward, StopReason, Trajectory, Turn

run = RunFolder.open(Path(sys.argv[1]), create=True)
attempt = run.begin_attempt({"argv": sys.argv}, {"model": "m"}, {})
writer = RunWriter(run)
print("attempt", attempt, flush=True)
for n in itertools.count():
    with writer.span("train", step=n):
        writer.metrics({"reward/mean": float(n)}, step=n, version=n)
    if n % 5 == 0:
        size = n % 50 + 1
        said = Completion(tuple(range(size)), (-0.5,) * size, (n,) * size, StopReason.EOS)
        writer.rollout(
            Trajectory(f"t{n}", "h", (Turn.given([n]), Turn.sampled(said)), Reward(1.0)),
            group_id="g", step=n, task_id="t", reply_text="x" * (n % 997), prompt_text="p",
            split="train", advantage=0.5)
    if n % 20 == 0:
        writer.ledger({"kind": "draws", "step": n // 20})
        print("ledger", n // 20, flush=True)
    if n % 70 == 0:
        writer.flush()
        print("flushed", n, flush=True)
    if n % 110 == 0:
        run.update(step=n)
    time.sleep(0.0005)
"""


def digests(path: Path) -> dict[str, str]:
    names = ("events", "rollouts", "tokens", "ledger", "config")
    files = (f for name in names for f in (path / name).rglob("*") if f.is_file())
    return {str(f): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def promised(output: str) -> dict[str, int]:
    """The last number of each kind; a last line cut short promises nothing."""
    rows = [line.split() for line in output.splitlines(keepends=True) if line.endswith("\n")]
    return {kind: int(value) for kind, value in rows}


def check_attempt(reader: RunReader, attempt: int, told: dict[str, int]) -> None:
    metrics = [r for r in reader.metrics() if r["attempt"] == attempt]
    assert [r["step"] for r in metrics] == list(range(len(metrics))), "not a prefix of what was written"
    assert len(metrics) > told.get("flushed", -1), "a flushed record is missing"
    ledger = [e["step"] for e in reader.ledger() if e["attempt"] == attempt]
    assert ledger == list(range(len(ledger)))
    # One more than promised may be there: killed between the disk and the promise.
    assert told.get("ledger", -1) + 1 <= len(ledger) <= told.get("ledger", -1) + 2
    rollouts = [r for r in reader.rollouts() if r["attempt"] == attempt]
    assert [r["step"] for r in rollouts] == [5 * n for n in range(len(rollouts))]
    for rollout in rollouts:
        columns = reader.tokens(rollout)
        assert len(columns) == rollout["token_count"]
        assert columns.ids[0] == rollout["step"]
    open_spans = [s for s in reader.spans() if s["attempt"] == attempt and s["open"]]
    assert len(open_spans) <= 1


def test_twenty_random_kills_leave_a_readable_run_each_time(tmp_path: Path) -> None:
    random_moment = random.Random(20)
    path = tmp_path / "run"
    RunFolder.open(path, create=True)
    reader = RunReader(path)
    lost_s: list[float] = []
    before: dict[str, str] = {}
    for round_ in range(20):
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        first = child.stdout.readline() if round_ % 4 else ""  # every fourth is killed while it starts
        time.sleep(random_moment.uniform(0.0, 0.5))
        killed_m = time.monotonic()
        child.kill()
        told = promised(first + child.stdout.read())
        child.wait()

        after = digests(path)
        kept = {name: digest for name, digest in before.items() if "/." not in name}  # drafts are swept
        assert {name: after.get(name) for name in kept} == kept, "an earlier attempt's file was changed"
        before = after
        assert reader.state().state in ("lost", "empty")
        attempts = [a["attempt"] for a in reader.attempts()]
        assert attempts == list(range(1, len(attempts) + 1))
        if "attempt" in told:
            assert told["attempt"] == attempts[-1]
            check_attempt(reader, told["attempt"], told)
            metrics = [r["m"] for r in reader.metrics() if r["attempt"] == told["attempt"]]
            if metrics:
                lost_s.append(killed_m - metrics[-1])
    assert not reader.skipped
    assert len(lost_s) >= 10
    # What a kill loses is what waited in the queue; the median, because this machine may be busy.
    assert statistics.median(lost_s) <= 1.0


def test_a_killed_run_is_continued_in_new_files(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for _ in range(2):
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        while "flushed 70" not in child.stdout.readline():
            pass
        child.kill()
        child.wait()
    assert sorted(p.name for p in (path / "ledger").iterdir()) == ["attempt-1.jsonl", "attempt-2.jsonl"]
    assert {p.name for p in (path / "events" / "controller").iterdir()} == {
        f"{stream}-{n}.jsonl" for stream in ("metrics", "spans", "events") for n in (1, 2)
    }
    assert sorted(p.name for p in (path / "tokens").iterdir()) == [
        "attempt-1.bin",
        "attempt-1.idx",
        "attempt-2.bin",
        "attempt-2.idx",
    ]
