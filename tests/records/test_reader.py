"""The reader: tolerant of damage, intolerant of guessing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from palestra.errors import RecordError
from palestra.records.folder import NewerSchemaError, RunFolder
from palestra.records.reader import RunReader
from palestra.records.writer import RunWriter


def everything(reader: RunReader) -> dict[str, Any]:
    """All views at once."""
    rollouts = reader.rollouts()
    return {
        "info": reader.info(),
        "attempts": reader.attempts(),
        "metrics": reader.metrics(),
        "events": reader.events(),
        "spans": reader.spans(),
        "rollouts": rollouts,
        "ledger": reader.ledger(),
        "evals": reader.evals(),
        "tokens": [reader.tokens(r) for r in rollouts],
        "series": reader.series("reward/mean"),
        "checkpoints": [(c.step, c.complete) for c in reader.checkpoints()],
    }


@pytest.fixture
def written(folder: RunFolder, writer: RunWriter, trajectory: Any) -> Path:
    for step in (1, 2, 3):
        with writer.span("train", step=step):
            writer.metrics({"reward/mean": step / 4, "other": 1.0}, step=step, version=step)
        writer.event("state", step=step, state="training", reason="")
        writer.rollout(
            trajectory(f"t{step}"),
            group_id="g",
            step=step,
            task_id="t",
            reply_text=f"r{step}",
            prompt_text="p",
            split="eval" if step == 3 else "train",
            advantage=0.25,
        )
        writer.ledger({"kind": "draws", "step": step})
    writer.evaluation({"when": "before"})
    writer.flush()
    for step, complete in ((5, True), (10, False)):
        (folder.checkpoints_dir / str(step)).mkdir()
        if complete:
            (folder.checkpoints_dir / str(step) / "COMMITTED").write_text("5\n")
    return folder.path


def lines_of(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*.jsonl"))


def test_a_copied_run_opens_to_the_same_views(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, tmp_path / "elsewhere" / "copy")
    assert everything(RunReader(tmp_path / "elsewhere" / "copy")) == everything(RunReader(written))


def test_reading_changes_nothing_on_the_disk(written: Path) -> None:
    def snapshot() -> list[tuple[str, int, int]]:
        return sorted(
            (str(p), p.stat().st_mtime_ns, p.stat().st_size)
            for p in written.rglob("*")
            if p.name != "heartbeat"
        )

    before = snapshot()
    everything(RunReader(written))
    RunReader(written).state()
    assert snapshot() == before


def test_a_torn_last_line_is_no_record_wherever_it_was_cut(written: Path) -> None:
    reader = RunReader(written)
    path = written / "events" / "controller" / "metrics-1.jsonl"
    whole = path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for cut in range(start, len(whole)):
        path.write_bytes(whole[:cut])
        assert [r["step"] for r in reader.metrics()] == [1, 2]
    assert not reader.skipped


GARBAGE = [
    b"\xff\xfe\x00\x01",
    b"not json",
    b"[1, 2]",
    b'"text"',
    b"null",
    b"{",
    b'{"a": }',
    b"[" * 200_000,
    b"\x00" * 64,
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_line_that_does_not_parse_is_skipped_and_counted(written: Path, garbage: bytes) -> None:
    for path in lines_of(written):
        content = path.read_bytes()
        middle = content.index(b"\n") + 1 if content.count(b"\n") > 1 else 0
        path.write_bytes(content[:middle] + garbage + b"\n" + content[middle:])
    reader = RunReader(written)
    assert [r["step"] for r in reader.metrics()] == [1, 2, 3]
    assert [e["step"] for e in reader.ledger()] == [1, 2, 3]
    assert len(reader.rollouts()) == 3
    assert len(reader.spans()) == 3
    assert sum(reader.skipped.values()) == 4


def test_unknown_keys_are_kept_and_odd_records_do_not_stop_a_reader(written: Path) -> None:
    odd = [
        {"future": 1},
        {"type": "metrics", "values": 3, "step": 9},
        {"values": {"reward/mean": 9.0}, "step": "x"},
        {"type": "metrics", "values": {"reward/mean": 0.875, "new": [1]}, "step": 4, "colour": "red"},
    ]
    for path in lines_of(written):
        with path.open("a") as handle:
            handle.writelines(json.dumps(record) + "\n" for record in odd)
    reader = RunReader(written)
    views = everything_but_tokens(reader)
    assert views["metrics"][-1]["colour"] == "red"
    assert reader.series("reward/mean") == [(1.0, 0.25), (2.0, 0.5), (3.0, 0.75), (4.0, 0.875)]


def everything_but_tokens(reader: RunReader) -> dict[str, Any]:
    return {
        "metrics": reader.metrics(),
        "events": reader.events(),
        "spans": reader.spans(),
        "rollouts": reader.rollouts(),
        "ledger": reader.ledger(),
        "evals": reader.evals(),
    }


def test_foreign_files_are_ignored(written: Path) -> None:
    before = everything(RunReader(written))
    for name in (
        "notes.md",
        "events/readme",
        "events/controller/metrics-1.jsonl.bak",
        "events/controller/.nfs01",
        "events/controller/metrics-x.jsonl",
        "rollouts/attempt-1.jsonl~",
        "ledger/old.jsonl",
        "config/attempt_x",
        "checkpoints/.writing-7/a",
        "checkpoints/latest",
        "tokens/x.bin",
    ):
        (written / name).parent.mkdir(exist_ok=True)
        (written / name).write_bytes(b"\x00garbage\n{}\n")
    assert everything(RunReader(written)) == before


def test_metrics_can_be_asked_by_name(written: Path) -> None:
    found = RunReader(written).metrics(["reward/mean"])
    assert [r["values"] for r in found] == [
        {"reward/mean": 0.25},
        {"reward/mean": 0.5},
        {"reward/mean": 0.75},
    ]
    assert RunReader(written).metrics(["never"]) == []


def test_rollouts_can_be_asked_by_step_split_and_count(written: Path) -> None:
    reader = RunReader(written)
    assert [r["id"] for r in reader.rollouts(step=2)] == ["t2"]
    assert [r["id"] for r in reader.rollouts(split="eval")] == ["t3"]
    assert [r["id"] for r in reader.rollouts(limit=2)] == ["t1", "t2"]
    assert reader.rollouts(limit=0) == []


def test_checkpoints_are_complete_only_with_their_marker(written: Path) -> None:
    found = RunReader(written).checkpoints()
    assert [(c.step, c.complete) for c in found] == [(5, True), (10, False)]
    assert found[0].path == written / "checkpoints" / "5"


def test_attempts_carry_their_configuration(written: Path) -> None:
    (attempt,) = RunReader(written).attempts()
    assert attempt["attempt"] == 1
    assert attempt["resolved"] == {"model": "tiny", "steps": 9}
    assert attempt["provenance"] == {"steps": "job.py:3"}
    assert attempt["started"] > 1.7e9


def test_a_later_attempt_supersedes_the_steps_it_repeats(folder: RunFolder) -> None:
    """A resumed run goes back to its checkpoint: what lay beyond it did not happen."""

    def attempt(steps: range, offset: float) -> None:
        writer = RunWriter(folder)
        for step in steps:
            writer.metrics({"reward/mean": step + offset}, step=step, version=step)
        writer.close()

    attempt(range(1, 7), 0.0)
    folder.begin_attempt({}, {}, {})
    attempt(range(4, 6), 0.5)
    reader = RunReader(folder.path)
    assert reader.series("reward/mean") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.5), (5, 5.5)]
    assert [v for _, v in reader.series("reward/mean", x="t")] == [1.0, 2.0, 3.0, 4.5, 5.5]
    assert len(reader.metrics()) == 8  # nothing is deleted
    folder.begin_attempt({}, {}, {})
    attempt(range(2, 3), 0.25)
    assert reader.series("reward/mean") == [(1, 1.0), (2, 2.25)]


def test_points_out_of_order_are_kept(folder: RunFolder, writer: RunWriter) -> None:
    """wandb#10628, CASES 29: steps that do not increase lose no point."""
    for step in (3, 1, 2):
        writer.metrics({"a": float(step)}, step=step, version=9 - step)
    writer.flush()
    reader = RunReader(folder.path)
    assert reader.series("a") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert reader.series("a", x="version") == [(6, 3.0), (7, 2.0), (8, 1.0)]
    assert [v for _, v in reader.series("a", x="m")] == [3.0, 1.0, 2.0]


def test_a_run_without_run_json_is_still_readable(written: Path) -> None:
    (written / "run.json").unlink()
    reader = RunReader(written)
    assert len(reader.metrics()) == 3
    assert reader.info() == {}
    assert reader.state().state == "lost"
    (written / "run.json").write_bytes(b"\xff")
    assert len(reader.ledger()) == 3
    assert "damaged" in reader.state().reason


def test_what_is_no_run_is_refused(tmp_path: Path, written: Path) -> None:
    with pytest.raises(RecordError) as caught:
        RunReader(written.parent / "frist")
    assert caught.value.nearest == "first"
    with pytest.raises(RecordError, match="not a run"):
        RunReader(tmp_path)


def test_a_newer_schema_is_refused(written: Path) -> None:
    (written / "run.json").write_text('{"schema": 3}')
    with pytest.raises(NewerSchemaError):
        RunReader(written)


def test_damaged_tokens_are_an_error_and_never_other_tokens(written: Path) -> None:
    reader = RunReader(written)
    first, second, third = reader.rollouts()
    blob = bytearray((written / "tokens" / "attempt-1.bin").read_bytes())
    blob[len(blob) // 2] ^= 1
    (written / "tokens" / "attempt-1.bin").write_bytes(bytes(blob))
    assert len(reader.tokens(first)) == 5
    with pytest.raises(RecordError, match="not those that were written"):
        reader.tokens(second)
    with pytest.raises(RecordError, match="ends before"):
        reader.tokens({**third, "tokens": {"segment": "attempt-1", "index": 3}})


@pytest.mark.parametrize(
    "where",
    [
        None,
        {},
        {"segment": "../../etc/passwd", "index": 0},
        {"segment": "attempt-1/../x", "index": 0},
        {"segment": "attempt-1", "index": -1},
        {"segment": "attempt-1", "index": "0"},
    ],
)
def test_a_record_cannot_point_outside_the_run(written: Path, where: Any) -> None:
    with pytest.raises(RecordError, match="names no token columns"):
        RunReader(written).tokens({"id": "x", "tokens": where})


def test_a_read_only_disk_is_enough(small_disk: Any, trajectory: Any) -> None:
    run = RunFolder.open(small_disk.path / "r", create=True)
    run.begin_attempt({}, {}, {})
    writer = RunWriter(run)
    writer.metrics({"reward/mean": 0.5}, step=1, version=0)
    writer.rollout(
        trajectory(),
        group_id="g",
        step=1,
        task_id="t",
        reply_text="r",
        prompt_text="p",
        split="train",
        advantage=1.0,
    )
    writer.close()
    run.set_status("finished", "1 steps")
    run.unlock()
    small_disk.read_only()
    reader = RunReader(run.path)
    views = everything(reader)
    assert (len(views["metrics"]), len(views["tokens"])) == (1, 1)
    assert reader.state() == ("finished", "1 steps")
    again = RunFolder.open(run.path, create=False)
    with pytest.raises(RecordError, match="Read-only"):
        again.lock()
    with pytest.raises(RecordError, match="Read-only"):
        again.set_status("failed")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_records_that_may_not_be_read_are_an_error_and_not_an_empty_run(written: Path) -> None:
    path = written / "ledger" / "attempt-1.jsonl"
    path.chmod(0)
    with pytest.raises(RecordError, match="could not be read"):
        RunReader(written).ledger()
