"""What recording costs the run: microseconds a call, beside a bare json.dumps and write of the same values.

``python benchmarks/records.py`` interleaves ours and the baseline for several rounds and prints medians of
two times per call: in the caller (what the loop waits) and CPU of the whole process (the writer's thread
included, because it takes the same interpreter lock). The durable ledger is compared with a bare write and
fsync, the panel's drawing with one core. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from palestra.records.folder import RunFolder
from palestra.records.writer import RunWriter
from palestra.types import Completion, Reward, StopReason, Trajectory, Turn
from palestra.ui.panel import REFRESH_S, LivePanel

VALUES = {f"group/metric_{n}": n / 7 for n in range(25)}
SAID = Completion(tuple(range(40)), (-0.5,) * 40, (3,) * 40, StopReason.EOS)
TRAJECTORY = Trajectory("t", "h" * 64, (Turn.given(range(60)), Turn.sampled(SAID)), Reward(1.0))
TEXT = "a reply of a model of some forty tokens, " * 4


def rollout_line() -> dict[str, object]:
    """What a bare recorder would write of a rollout: everything as JSON."""
    return {
        "id": TRAJECTORY.id, "reward": 1.0, "prompt": TEXT, "reply": TEXT, "tokens": TRAJECTORY.token_ids,
        "logprobs": TRAJECTORY.logprobs, "versions": TRAJECTORY.versions, "sampled": TRAJECTORY.sampled_mask,
    }  # fmt: skip


class Bare:
    """The baseline: one file, one json.dumps and one write a call."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def say(self, record: object) -> None:
        self._file.write(json.dumps(record) + "\n")

    def say_durably(self, record: object) -> None:
        self.say(record)
        os.fsync(self._file.fileno())


def timed(call: Callable[[], object], count: int, settle: Callable[[], object]) -> tuple[float, float]:
    """Microseconds per call: in the caller, and CPU of the process until everything is written."""
    cpu = time.process_time()
    start = time.perf_counter()
    for _ in range(count):
        call()
    waited = time.perf_counter() - start
    settle()
    return waited / count * 1e6, (time.process_time() - cpu) / count * 1e6


def compare(name: str, ours: Callable[[], object], bare: Callable[[], object], count: int, rounds: int,
            settle: Callable[[], object]) -> None:  # fmt: skip
    rows: dict[str, list[tuple[float, float]]] = {"ours": [], "bare": []}
    for round_ in range(rounds + 1):
        for who, call in (("ours", ours), ("bare", bare)):
            result = timed(call, count, settle if who == "ours" else lambda: None)
            if round_:  # the first is warm-up
                rows[who].append(result)
    (call_us, cpu_us), (bare_us, bare_cpu_us) = (
        tuple(statistics.median(column) for column in zip(*rows[who], strict=True))
        for who in ("ours", "bare")
    )
    print(f"{name:<22}{call_us:>10.1f}{bare_us:>10.1f}{call_us / bare_us:>8.2f}x"
          f"{cpu_us:>12.1f}{bare_cpu_us:>10.1f}{cpu_us / bare_cpu_us:>8.2f}x")  # fmt: skip


def panel_cost(rounds: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    panel = LivePanel("benchmark", 1000, console=console)
    values = {"reward/mean": 0.5, "time/step_s": 1.0, "tokens/sampled": 100.0, "groups/total": 8.0}
    records = [
        {"type": "metrics", "m": float(n), "step": n, "version": n, "values": VALUES | values}
        for n in range(1000)
    ]
    waiting = iter(records)
    feed_us, _ = timed(lambda: panel.feed(next(waiting)), len(records), lambda: None)
    draws = [timed(lambda: console.print(panel.render()), 20, lambda: None)[1] for _ in range(rounds)]
    draw_us = statistics.median(draws)
    print(f"panel: {feed_us:.1f} us to feed a step, {draw_us / 1000:.1f} ms CPU to draw; "
          f"at most {draw_us / REFRESH_S / 1e4:.1f} % of one core while records arrive")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--count", type=int, default=2000)
    args = parser.parse_args()
    print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, "
          f"{args.rounds} rounds of {args.count} calls, medians, microseconds")  # fmt: skip
    print(f"{'':<22}{'call':>10}{'bare':>10}{'':>9}{'CPU':>12}{'bare':>10}")
    with tempfile.TemporaryDirectory() as place:
        run = RunFolder.open(Path(place) / "run", create=True)
        run.begin_attempt({}, {}, {})
        writer, bare = RunWriter(run), Bare(Path(place) / "bare.jsonl")

        def plain(**fields: object) -> None:
            bare.say({"t": time.time(), "m": time.monotonic(), "step": 1, "version": 1, **fields})

        def span() -> None:
            with writer.span("train", step=1, version=1):
                pass

        def plain_span() -> None:
            plain(name="train", phase="open")
            plain(name="train", phase="close")

        def rollout() -> None:
            writer.rollout(
                TRAJECTORY,
                group_id="g",
                step=1,
                task_id="t",
                reply_text=TEXT,
                prompt_text=TEXT,
                split="train",
                advantage=0.5,
            )

        def event() -> None:
            writer.event("state", step=1, state="training", reason="step 1")

        entry = {"kind": "draws", "step": 1, "draws": list(range(8)), "tasks": ["h" * 64] * 8}
        n = args.count
        cases: list[tuple[str, Callable[[], object], Callable[[], object], int]] = [
            (
                "metrics (25 values)",
                lambda: writer.metrics(VALUES, step=1, version=1),
                lambda: plain(values=VALUES),
                n,
            ),
            (
                "metrics (1 value)",
                lambda: writer.metrics({"a": 0.5}, step=1, version=1),
                lambda: plain(values={"a": 0.5}),
                n,
            ),
            ("event", event, lambda: plain(state="training", reason="step 1"), n),
            ("span (open and close)", span, plain_span, n),
            ("rollout (100 tokens)", rollout, lambda: bare.say(rollout_line()), n // 4),
            ("ledger (durable)", lambda: writer.ledger(entry), lambda: bare.say_durably(entry), n // 20),
        ]
        for name, ours, other, count in cases:
            compare(name, ours, other, count, args.rounds, lambda: writer.flush(60))
        print(f"dropped {writer.dropped}, degraded {writer.degraded}")
        writer.close()
        run.unlock()
    panel_cost(args.rounds)


if __name__ == "__main__":
    main()
