"""The writer: never in the way, never silent about what it lost, durable where it promised."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import threading
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from palestra.errors import RecordError
from palestra.records.folder import RunFolder
from palestra.records.reader import RunReader
from palestra.records.writer import RunWriter


def strict_lines(path: Path) -> list[dict[str, Any]]:
    """The lines as a parser reads them that knows no NaN."""

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_metrics_carry_every_clock(folder: RunFolder, writer: RunWriter) -> None:
    """wandb#10628, CASES 29: several clocks per point, and none of them has to increase."""
    writer.metrics({"a": 1.0}, step=5, version=4)
    writer.metrics({"a": 2.0}, step=3, version=6)
    writer.metrics({"a": 3.0}, step=None, version=None)
    writer.flush()
    found = RunReader(folder.path).metrics()
    assert [(r["step"], r["version"], r["values"]["a"]) for r in found] == [
        (5, 4, 1.0),
        (3, 6, 2.0),
        (None, None, 3.0),
    ]
    assert found[0]["m"] <= found[1]["m"] <= found[2]["m"]
    assert all(r["t"] > 1.7e9 for r in found)


def test_special_floats_are_strict_json_and_come_back(folder: RunFolder, writer: RunWriter) -> None:
    writer.metrics({"a": math.nan, "b": math.inf, "c": -math.inf}, step=1, version=0)
    writer.flush()
    line = strict_lines(folder.path / "events" / "controller" / "metrics-1.jsonl")[0]
    assert line["values"] == {"a": "NaN", "b": "Infinity", "c": "-Infinity"}
    values = RunReader(folder.path).metrics()[0]["values"]
    assert math.isnan(values["a"])
    assert (values["b"], values["c"]) == (math.inf, -math.inf)


def test_a_metric_that_is_no_number_is_kept_as_text_and_noted(folder: RunFolder, writer: RunWriter) -> None:
    writer.metrics({"bad": "high", "good": True}, step=1, version=0)  # type: ignore[dict-item]
    writer.flush()
    assert RunReader(folder.path).metrics()[0]["values"] == {"bad": "high", "good": 1.0}
    assert "'bad' is no number" in (writer.degraded or "")
    assert writer.dropped == 0


def test_numbers_of_array_libraries_are_numbers(folder: RunFolder, writer: RunWriter) -> None:
    class Scalar:
        def __float__(self) -> float:
            return 0.5

    writer.metrics({"x": Scalar()}, step=1, version=0)  # type: ignore[dict-item]
    writer.flush()
    assert RunReader(folder.path).metrics()[0]["values"] == {"x": 0.5}


def test_a_span_is_visible_while_it_is_open(folder: RunFolder, writer: RunWriter) -> None:
    """miles#1965: an evaluation that was open was invisible until it ended."""
    with writer.span("eval", step=3, version=2, tasks=20):
        writer.flush()
        (span,) = RunReader(folder.path).spans()
        assert (span["name"], span["open"], span["seconds"], span["attrs"]) == (
            "eval",
            True,
            None,
            {"tasks": 20},
        )
    writer.flush()
    (span,) = RunReader(folder.path).spans()
    assert not span["open"]
    assert span["seconds"] >= 0


def test_spans_nest_and_name_the_error_that_ended_them(folder: RunFolder, writer: RunWriter) -> None:
    with pytest.raises(KeyError), writer.span("train"), writer.span("forward"):
        raise KeyError("x")
    writer.flush()
    train, forward = RunReader(folder.path).spans()
    assert forward["parent"] == train["id"]
    assert train["parent"] is None
    assert (train["error"], forward["error"]) == ("KeyError", "KeyError")


async def test_spans_of_concurrent_tasks_do_not_become_each_others_parents(
    folder: RunFolder, writer: RunWriter
) -> None:
    async def episode(name: str) -> None:
        with writer.span(name):
            await asyncio.sleep(0)
            with writer.span(f"{name}.inner"):
                await asyncio.sleep(0)

    await asyncio.gather(*(episode(f"e{i}") for i in range(5)))
    writer.flush()
    spans = {s["name"]: s for s in RunReader(folder.path).spans()}
    assert all(spans[f"e{i}.inner"]["parent"] == spans[f"e{i}"]["id"] for i in range(5))


def test_an_event_may_have_fields_named_like_our_own(folder: RunFolder, writer: RunWriter) -> None:
    writer.event("state", step=1, state="training", t="mine", type="yours", m=3, attempt=9)
    writer.flush()
    (event,) = RunReader(folder.path).events("state")
    assert event["fields"] == {"state": "training", "t": "mine", "type": "yours", "m": 3, "attempt": 9}
    assert event["attempt"] == 1


def test_foreign_values_are_recorded_as_they_were_when_said(folder: RunFolder, writer: RunWriter) -> None:
    class Colour(Enum):
        RED = "red"

    items = [1]
    writer.event("odd", items=items, path=Path("/x"), raw=b"\xff", colour=Colour.RED, some={2, 1}, fn=len)
    items.append(2)
    writer.flush()
    fields = RunReader(folder.path).events("odd")[0]["fields"]
    assert fields | {"fn": 0} == {
        "items": [1],
        "path": "/x",
        "raw": "\\xff",
        "colour": "red",
        "some": [1, 2],
        "fn": 0,
    }


def test_a_structure_that_contains_itself_is_cut_off(folder: RunFolder, writer: RunWriter) -> None:
    loop: list[Any] = []
    loop.append(loop)
    writer.event("odd", loop=loop)
    assert writer.flush()
    assert len(RunReader(folder.path).events("odd")) == 1


def test_a_rollout_keeps_texts_outcome_and_tokens(
    folder: RunFolder, writer: RunWriter, trajectory: Any
) -> None:
    text = 'größer "quoted"\n\u2028 line \x00 \udc80'
    writer.rollout(
        trajectory("good"),
        group_id="g1",
        step=2,
        task_id="task",
        reply_text=text,
        prompt_text="p",
        split="train",
        advantage=0.5,
    )
    writer.rollout(
        trajectory("none", reward=None),
        group_id="g1",
        step=2,
        task_id="task",
        reply_text="",
        prompt_text="p",
        split="eval",
        advantage=None,
    )
    writer.flush()
    reader = RunReader(folder.path)
    good, none = reader.rollouts()
    assert good["reply"] == text
    assert (good["reward"], good["abstain"], good["advantage"], good["stop_reason"]) == (
        1.0,
        None,
        0.5,
        "eos",
    )
    assert good["turns"][1] == {"role": "assistant", "tokens": 3, "sampled": 3, "stop_reason": "eos"}
    assert (none["reward"], none["advantage"]) == (None, None)
    assert none["abstain"] == {"boundary": "sandbox", "reason": "boot failed", "detail": "trace"}
    columns = reader.tokens(good)
    assert list(columns.ids) == [1, 2, 10, 11, 12]
    assert list(columns.sampled) == [0, 0, 1, 1, 1]
    assert list(columns.versions) == [-1, -1, 4, 4, 4]
    assert list(columns.advantages) == [0.0, 0.0, 0.5, 0.5, 0.5]
    assert list(columns.logprobs) == [0.0, 0.0, 0.0, -0.25, -0.5]
    assert math.isnan(reader.tokens(none).advantages[-1])


def test_an_abstention_is_never_a_reward_of_zero(
    folder: RunFolder, writer: RunWriter, trajectory: Any
) -> None:
    """NeMo-Gym PR#2552, CASES 14: in the records too, a failure is no number."""
    for reward in (0.0, None):
        writer.rollout(
            trajectory(f"r{reward}", reward=reward),
            group_id="g",
            step=1,
            task_id="t",
            reply_text="",
            prompt_text="",
            split="train",
            advantage=None,
        )
    writer.flush()
    zero, abstained = RunReader(folder.path).rollouts()
    assert (zero["reward"], zero["abstain"]) == (0.0, None)
    assert abstained["reward"] is None
    assert abstained["abstain"] is not None


def test_a_ledger_entry_is_on_the_disk_when_the_call_returns(folder: RunFolder, writer: RunWriter) -> None:
    writer.ledger({"kind": "draws", "step": 1, "draws": [0, 1]})
    lines = strict_lines(folder.path / "ledger" / "attempt-1.jsonl")
    assert lines[0]["entry"] == {"kind": "draws", "step": 1, "draws": [0, 1]}


def test_ledger_entries_come_back_as_given(folder: RunFolder, writer: RunWriter) -> None:
    writer.ledger({"kind": "update", "step": 1, "t": "own"})
    writer.evaluation({"when": "before", "sampled": {"mean": 0.5}})
    reader = RunReader(folder.path)
    (entry,), (evaluation,) = reader.ledger(), reader.evals()
    assert entry | {"process": 0} == {"attempt": 1, "process": 0, "t": "own", "kind": "update", "step": 1}
    assert evaluation["sampled"] == {"mean": 0.5}


def test_a_full_queue_drops_and_counts_and_never_blocks(folder: RunFolder) -> None:
    writer = RunWriter(folder, queue_bytes=20_000, interval_s=3600)
    held = threading.Event()
    entered = threading.Event()

    def block(_: dict[str, Any]) -> None:
        entered.set()
        held.wait(30)

    writer.subscribe(block)
    writer.event("notice", text="first")
    writer._wake.set()
    assert entered.wait(30)
    for n in range(1000):  # the writer's thread is stuck: this must still return
        writer.metrics({"a": float(n)}, step=n, version=0)
    lost = writer.dropped
    assert 0 < lost < 1000
    writer.event("failure", text="the queue keeps room for events")
    assert writer.dropped == lost
    held.set()
    writer.close()
    reader = RunReader(folder.path)
    assert len(reader.metrics()) + lost == 1000
    assert [r["step"] for r in reader.metrics()] == list(range(1000 - lost))
    assert len(reader.events("failure")) == 1
    assert reader.events("dropped")[-1]["fields"]["count"] == lost


def test_subscribers_get_every_record_once_in_the_writers_thread(
    folder: RunFolder, writer: RunWriter, trajectory: Any
) -> None:
    seen: list[tuple[str, str]] = []
    writer.subscribe(lambda record: seen.append((record["type"], threading.current_thread().name)))
    writer.metrics({"a": 1.0}, step=1, version=0)
    with writer.span("train"):
        writer.event("notice", text="x")
    writer.rollout(
        trajectory(),
        group_id="g",
        step=1,
        task_id="t",
        reply_text="r",
        prompt_text="p",
        split="train",
        advantage=0.0,
    )
    writer.ledger({"kind": "draws", "step": 1})
    writer.evaluation({"when": "before"})
    writer.flush()
    assert [kind for kind, _ in seen] == ["metrics", "span", "event", "span", "rollout", "ledger", "eval"]
    assert {name for _, name in seen} == {"palestra-records-controller"}


@pytest.mark.parametrize("error", [ValueError("broken panel"), SystemExit(1)])
def test_a_subscriber_that_fails_is_dropped_and_the_rest_goes_on(
    folder: RunFolder, writer: RunWriter, error: BaseException
) -> None:
    """verl#4904, CASES 29: whoever watches a run may die without harm to it."""
    calls: list[int] = []
    healthy: list[int] = []

    def fail(_: dict[str, Any]) -> None:
        calls.append(1)
        raise error

    writer.subscribe(fail)
    writer.subscribe(lambda _: healthy.append(1))
    for _ in range(3):
        writer.metrics({"a": 1.0}, step=1, version=0)
        writer.flush()
    assert (len(calls), len(healthy)) == (1, 3)
    assert writer.degraded
    assert len(RunReader(folder.path).metrics()) == 3


def test_a_subscriber_may_write_records_and_flush_does_not_deadlock(
    folder: RunFolder, writer: RunWriter
) -> None:
    def echo(record: dict[str, Any]) -> None:
        if record["type"] == "metrics":
            writer.event("echo")
            assert not writer.flush()

    writer.subscribe(echo)
    writer.metrics({"a": 1.0}, step=1, version=0)
    assert writer.flush()
    assert writer.flush()
    assert len(RunReader(folder.path).events("echo")) == 1


def test_many_threads_write_whole_lines(folder: RunFolder, writer: RunWriter) -> None:
    def work(number: int) -> None:
        for n in range(200):
            writer.metrics({f"t{number}": float(n)}, step=n, version=0)
            if n % 50 == 0:
                writer.ledger({"kind": "draws", "thread": number, "n": n})

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.flush()
    reader = RunReader(folder.path)
    for number in range(4):
        assert [r["step"] for r in reader.metrics([f"t{number}"])] == list(range(200))
    assert len(reader.ledger()) == 16
    assert not reader.skipped


def test_after_close_nothing_is_written_and_the_ledger_says_so(folder: RunFolder) -> None:
    writer = RunWriter(folder)
    writer.metrics({"a": 1.0}, step=1, version=0)
    writer.close()
    writer.close()
    writer.metrics({"a": 2.0}, step=2, version=0)
    assert writer.dropped == 1
    with pytest.raises(RecordError, match="closed"):
        writer.ledger({"kind": "draws"})
    assert len(RunReader(folder.path).metrics()) == 1


def test_a_writer_needs_an_attempt_and_a_usable_name(tmp_path: Path, folder: RunFolder) -> None:
    with pytest.raises(RecordError, match="no attempt"):
        RunWriter(RunFolder.open(tmp_path / "new", create=True))
    for name in ("", "../up", "a/b", ".hidden", "x" * 100):
        with pytest.raises(RecordError, match="process name"):
            RunWriter(folder, name)


def test_one_process_name_has_one_writer_at_a_time(folder: RunFolder) -> None:
    """trackio#133, CASES 33: no file ever has two writers."""
    first = RunWriter(folder)
    with pytest.raises(RecordError, match="another writer records as 'controller'"):
        RunWriter(folder)
    first.event("a")
    first.close()
    second = RunWriter(folder)
    second.event("b")
    second.close()
    assert [e["kind"] for e in RunReader(folder.path).events()] == ["a", "b"]


CHILD = """
import sys
from pathlib import Path
from palestra.records.folder import RunFolder
from palestra.records.writer import RunWriter
writer = RunWriter(RunFolder.open(Path(sys.argv[1]), create=False), "trainer-0")
for n in range(500):
    writer.metrics({"shared": float(n)}, step=n, version=1)
    if n % 100 == 0:
        writer.ledger({"kind": "note", "n": n})
writer.close()
"""


def test_two_processes_write_one_run_side_by_side(folder: RunFolder, writer: RunWriter) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(folder.path)])
    for n in range(500):
        writer.metrics({"shared": float(n)}, step=n, version=0)
        if n % 100 == 0:
            writer.ledger({"kind": "note", "n": n})
    assert child.wait(timeout=60) == 0
    writer.flush()
    reader = RunReader(folder.path)
    for process in ("controller", "trainer-0"):
        assert [r["step"] for r in reader.metrics() if r["process"] == process] == list(range(500))
        assert [e["n"] for e in reader.ledger() if e["process"] == process] == [0, 100, 200, 300, 400]
    assert not reader.skipped


def test_a_forked_child_cannot_write_its_parents_records(folder: RunFolder, writer: RunWriter) -> None:
    writer.metrics({"a": 1.0}, step=1, version=0)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            writer.metrics({"a": 2.0}, step=2, version=0)
            writer.ledger({"kind": "draws"})
        except RecordError:
            code = 0 if writer.dropped == 1 else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    writer.metrics({"a": 3.0}, step=3, version=0)
    writer.flush()
    assert [r["step"] for r in RunReader(folder.path).metrics()] == [1, 3]


def test_what_was_said_before_a_normal_exit_is_written_without_close(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from palestra.records.folder import RunFolder
from palestra.records.writer import RunWriter
run = RunFolder.open(Path(sys.argv[1]), create=True)
run.begin_attempt({}, {}, {})
RunWriter(run).event("last words")
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "r")], check=True, timeout=60)
    assert [e["kind"] for e in RunReader(tmp_path / "r").events()] == ["last words"]


def test_a_ten_megabyte_line_is_a_line(folder: RunFolder, writer: RunWriter) -> None:
    writer.event("big", text="x" * 10_000_000)
    writer.metrics({"a": 1.0}, step=1, version=0)
    writer.flush()
    reader = RunReader(folder.path)
    assert len(reader.events("big")[0]["fields"]["text"]) == 10_000_000
    assert len(reader.metrics()) == 1


def test_a_clock_that_goes_backwards_changes_no_order(
    folder: RunFolder, writer: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter([2e9, 1e9, 3e9, 5e8])
    monkeypatch.setattr("palestra.records.writer.time.time", lambda: next(moments))
    for n in range(4):
        writer.metrics({"a": float(n)}, step=n, version=0)
    monkeypatch.undo()
    writer.flush()
    reader = RunReader(folder.path)
    assert [v for _, v in reader.series("a")] == [0.0, 1.0, 2.0, 3.0]
    assert [v for _, v in reader.series("a", x="t")] == [0.0, 1.0, 2.0, 3.0]
