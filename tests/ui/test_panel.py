"""The panel as a reader of the terminal sees it."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from palestra.records.folder import RunFolder
from palestra.records.reader import RunReader
from palestra.records.writer import RunWriter
from palestra.ui.panel import REFRESH_S, LivePanel

ATTACK = "\x1b[2Jboom [red]x[/red] \u202egnp\r\n\x07" + "z" * 300


def terminal(width: int, **options: Any) -> Console:
    return Console(
        width=width,
        file=io.StringIO(),
        force_terminal=True,
        record=True,
        color_system=options.pop("color_system", "standard"),
        **options,
    )


def drawn(width: int, records: Any = (), **options: Any) -> str:
    console = terminal(width, **options)
    panel = LivePanel("guess [bold]number[/bold]", 40, console=console)
    for record in records:
        panel.feed(record)
    console.print(panel.render())
    return console.export_text()


def test_the_panel_shows_what_a_run_is_asked_for(story: Any) -> None:
    text = drawn(80, story().whole(20))
    assert "palestra · guess [bold]number[/bold]" in text
    assert "20/40" in text
    assert "2:20 left" in text
    assert "0.025 → 0.500 ▁" in text
    assert "█ " in text
    for shown in ("generate 42%", "reward+sandbox 14%", "train 28%", "eval 2%", "other 14%"):
        assert shown in text
    assert "200 tokens/s" in text
    assert "91% useful" in text
    assert "3/8 zero-variance" in text
    assert "40 abstained" in text
    assert "last: sandbox: boot failed" in text
    assert "sampled 0.123 [0.080, 0.150]  → 0.550 [0.500, 0.600]" in text
    assert "greedy  0.200 [0.100, 0.300]  → 0.620 [0.580, 0.680]" in text
    assert "training: boot failed" in text
    assert "notice   boot failed" in text


def test_the_percentages_of_the_strip_sum_to_a_hundred(story: Any) -> None:
    for steps in range(1, 12):
        line = drawn(200, story().whole(steps))
        found = [
            int(word[:-1]) for word in line.split("■", 1)[1].split("tokens")[0].split() if word.endswith("%")
        ]
        assert sum(found) == 100


@pytest.mark.parametrize("width", [1, 10, 20, 40, 80, 200])
@pytest.mark.parametrize("colour", ["standard", None])
def test_no_width_breaks_the_frame(story: Any, width: int, colour: str | None) -> None:
    for records in ((), story().whole(1), story().whole(20, ATTACK), story().whole(20, "数学" * 60)):
        lines = drawn(width, records, color_system=colour).rstrip("\n").split("\n")
        assert all(cell_len(line) <= width for line in lines)
        if width >= 20:
            assert len({cell_len(line) for line in lines}) == 1
            assert lines[0][0] == "╭"
            assert all(line[0] == line[-1] == "│" for line in lines[1:-1])


def test_forty_columns_keep_every_number_whole(story: Any) -> None:
    text = drawn(40, story().whole(20))
    for shown in (
        "generate 42%",
        "reward+sandbox 14%",
        "train 28%",
        "sampled 0.123 [0.080, 0.150]",
        "→ 0.550 [0.500, 0.600]",
        "200 tokens/s",
        "3/8 zero-variance",
    ):
        assert shown in text
    assert "…" not in text.split("\n", 1)[1]


def test_model_text_cannot_reach_the_terminal(story: Any) -> None:
    """Helicone#5588, CASES 34: model output is only ever text."""
    console = terminal(80)
    panel = LivePanel(ATTACK, 40, console=console)
    for record in story().whole(3, ATTACK):
        panel.feed(record)
    console.print(panel.render())
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[2J" not in written
    assert "\x07" not in written
    assert "\u202e" not in written
    assert "boom [red]x[/red] gnp" in written


def test_without_colour_the_strip_is_made_of_letters(story: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console = terminal(80)
    panel = LivePanel("x", 40, console=console)
    for record in story().whole(20):
        panel.feed(record)
    console.print(panel.render())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "GGGGGGGG" in text
    assert "G generate 42%" in text
    assert not any(f"\x1b[{code}m" in text for code in range(30, 50))


def test_a_terminal_without_utf8_gets_ascii(story: Any) -> None:
    raw = io.BytesIO()
    console = Console(
        file=io.TextIOWrapper(raw, encoding="ascii"), force_terminal=True, width=60, color_system="standard"
    )
    panel = LivePanel("größer " * 30, 40, console=console)
    for record in story().whole(20, "größer → " * 60):
        panel.feed(record)
    console.print(panel.render())
    console.file.flush()
    text = raw.getvalue().decode("ascii")
    assert "0.025 -> 0.500" in text
    assert "gr??er" in text
    assert "+-" in text


def piped(records: Any, steps: int = 40, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding=encoding), width=80)
    with LivePanel("x", steps, console=console) as panel:
        for record in records:
            panel.feed(record)
    console.file.flush()
    return raw.getvalue().decode(encoding)


def test_a_pipe_gets_one_plain_line_per_step(story: Any) -> None:
    lines = piped(story().whole(20)).splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == [f"{n}/40" for n in range(1, 21)]
    assert steps[1] == (
        "step 2/40  reward 0.050  200 tokens/s  useful 91%  zero-variance 3/8  "
        "abstained 2 (sandbox: boot failed)  loss 0.0125  7.0 s  4:26 left"
    )
    assert lines[0] == "starting: boot failed"
    assert "held-out before: sampled 0.123 [0.080, 0.150]  greedy 0.200 [0.100, 0.300]" in lines
    assert "held-out after: sampled 0.550 [0.500, 0.600]  greedy 0.620 [0.580, 0.680]" in lines
    assert "notice: boot failed" in lines


def test_a_pipe_gets_no_escape_and_no_unknown_character(story: Any) -> None:
    for encoding in ("utf-8", "ascii"):
        text = piped(story().whole(3, ATTACK + "größer"), encoding=encoding)
        assert "\x1b" not in text
        assert "\r" not in text
        assert len([line for line in text.splitlines() if line.startswith("step ")]) == 3


def test_a_starved_step_is_told_on_a_pipe(story: Any) -> None:
    tale = story()
    text = piped(
        [
            tale.event("state", 1, state="generating", reason="x"),
            tale.event("state", 1, state="starved", reason="every advantage is 0"),
        ]
    )
    assert text == "starved: every advantage is 0\n"


def test_why_a_starved_step_had_no_verdict_is_said_once(story: Any) -> None:
    tale = story()
    why = "reward returned None (job.py:3)"
    starved = f"step 1 taught nothing: 4 episodes abstained, 4 of them at the reward boundary: {why}"
    text = piped(
        [
            tale.event("abstain", 1, boundary="reward", count=4, reason=why),
            tale.event("state", 1, state="starved", reason=starved),
            tale.metrics(1, time__step_s=1.0, abstained=4.0),
        ]
    )
    assert text.startswith("starved: step 1 taught nothing\nstep 1")
    assert text.count(why) == 1


def test_a_dumb_terminal_gets_lines(story: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with LivePanel("x", 40, console=console) as panel:
        for record in story().step(1):
            panel.feed(record)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.startswith("step 1/40")
    assert "\x1b" not in text


def test_nothing_is_printed_before_start_and_after_stop(story: Any) -> None:
    console = Console(file=io.StringIO(), width=80)
    panel = LivePanel("x", 40, console=console)
    for record in story().whole(2):
        panel.feed(record)
    panel.start()
    panel.start()
    panel.stop()
    panel.stop()
    for record in story().step(3):
        panel.feed(record)
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]


class Counting(LivePanel):
    draws = 0

    def render(self) -> RenderableType:
        self.draws += 1
        return super().render()


def test_a_flood_of_records_is_drawn_at_most_twice_a_second(story: Any) -> None:
    """verifiers#2529: a live terminal view that grew with the run blocked it."""
    panel = Counting("x", 2000, console=terminal(80))
    started = time.monotonic()
    with panel:
        for record in story().whole(2000):
            panel.feed(record)
        time.sleep(0.6)
    assert panel.draws <= (time.monotonic() - started) / REFRESH_S + 3  # the first, the last, and one begun
    assert panel.draws >= 3


class Gone(io.StringIO):
    """A terminal whose other end closes after a while."""

    closed_by_peer = False
    kind: type[BaseException] = BrokenPipeError

    def write(self, text: str) -> int:
        if self.closed_by_peer:
            raise self.kind("gone")
        return super().write(text)


@pytest.mark.parametrize("tty", [True, False])
@pytest.mark.parametrize("kind", [BrokenPipeError, OSError])
def test_a_terminal_that_goes_away_ends_the_output_and_not_the_run(
    story: Any, tty: bool, kind: type[BaseException]
) -> None:
    file = Gone()
    file.kind = kind
    panel = LivePanel("x", 40, console=Console(file=file, force_terminal=tty, width=80))
    panel.start()
    file.closed_by_peer = True
    for record in story().whole(5):
        panel.feed(record)
    if panel._thread is not None:
        panel._thread.join(timeout=20)
        assert not panel._thread.is_alive()
    panel.stop()
    assert panel.progress.step == 5


def test_a_panel_fed_by_a_writer_and_one_that_replays_its_run_agree(tmp_path: Path) -> None:
    run = RunFolder.open(tmp_path / "r", create=True)
    live = LivePanel("r", 3, console=Console(file=io.StringIO(), width=80))
    for attempt, steps in ((1, (1, 2, 3)), (2, (2, 3))):
        run.begin_attempt({}, {}, {})
        writer = RunWriter(run)
        writer.subscribe(live.feed)
        for step in steps:
            with writer.span("generate", step=step):
                writer.event("state", step=step, state="generating", reason=f"step {step}")
            writer.event("abstain", step=step, boundary="engine", reason="lost", count=1)
            writer.metrics(
                {"reward/mean": attempt + step / 10, "time/step_s": 1.0, "tokens/sampled": 10.0},
                step=step,
                version=1,
            )
        writer.close()
        live.progress.begin_attempt()
    run.unlock()
    replayed = LivePanel("r", 3, console=Console(file=io.StringIO(), width=80))
    replayed.replay(RunReader(run.path))
    assert replayed.progress.rewards == live.progress.rewards == {1: 1.1, 2: 2.2, 3: 2.3}
    assert replayed.progress.abstained == live.progress.abstained == 5
    assert replayed.progress.state_reason == live.progress.state_reason == "step 3"
    assert replayed.progress.elapsed_s() == pytest.approx(live.progress.elapsed_s())
    assert replayed.progress.phases() == pytest.approx(live.progress.phases())


def test_feeding_from_many_threads_loses_no_step(story: Any) -> None:
    panel = LivePanel("x", 400, console=terminal(80))
    tale = story()

    def work(first: int) -> None:
        for step in range(first, 400, 4):
            panel.feed({**tale.event("abstain", step, boundary="engine", reason="r", count=1)})
            panel.render()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert panel.progress.abstained == 400


ON_A_TERMINAL = """
import time
from palestra.ui.panel import LivePanel
with LivePanel("on a terminal", 3) as panel:
    for step in range(1, 4):
        panel.feed({"type": "metrics", "m": float(step), "step": step, "version": 0,
                    "values": {"reward/mean": step / 10, "time/step_s": 1.0}})
        print("a line of the user's own")
        time.sleep(0.1)
print("after")
"""


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_on_a_real_terminal_the_last_panel_stays_and_the_cursor_comes_back(columns: int) -> None:
    master, slave = pty.openpty()
    env = {**os.environ, "COLUMNS": str(columns), "LINES": "24", "TERM": "xterm-256color", "PYTHONUTF8": "1"}
    child = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL], stdout=slave, stderr=slave, stdin=slave, env=env
    )
    os.close(slave)
    written = b""
    while True:
        try:
            block = os.read(master, 65536)
        except OSError:  # the other end closed
            break
        if not block:
            break
        written += block
    os.close(master)
    assert child.wait(timeout=60) == 0
    text = written.decode()
    assert text.count("a line of the user's own") == 3
    assert text.index("\x1b[?25l") < text.rindex("\x1b[?25h")
    last = text[text.rindex("╭") :]
    assert "3/3" in last
    assert "0.100 → 0.300" in last
    assert last.rstrip().endswith("after")


def test_reading_the_panel_needs_no_torch_and_no_numpy() -> None:
    code = (
        "import sys, palestra.ui.panel, palestra.records.writer; print({'torch','numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "set()\n"
