"""The live panel of a run: a view of its records and nothing else.

`LivePanel.feed` subscribes to a writer; `replay` reads a run's folder. On a
terminal it is one panel redrawn at most twice a second, only when something
changed or a second passed; anywhere else it is one plain line per finished step,
without any cursor movement or colour. Text that a model, a task or a program wrote
passes `safe_text` first and never is markup. A terminal that goes away ends the
output, never the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from palestra.records.reader import RunReader
from palestra.ui.progress import RunProgress, StepLine
from palestra.ui.sparkline import duration
from palestra.ui.text import safe_text
from palestra.ui.view import View, interval

REFRESH_S = 0.5
_IDLE_S = 1.0
"""An unchanged panel is redrawn this often, for its clocks."""


class LivePanel:
    """``with LivePanel(title, steps) as panel: writer.subscribe(panel.feed)``. Thread-safe."""

    def __init__(self, title: str, steps: int, *, console: Console | None = None) -> None:
        self._title = safe_text(title, 120)
        self._console = console or Console()
        self._progress = RunProgress(steps=steps)
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._thread: threading.Thread | None = None
        self._running = False
        self._stop = threading.Event()
        self._changed = threading.Event()
        self._quiet = False
        # rich knows NO_COLOR; a dumb terminal cannot move its cursor, so it gets lines.
        self._interactive = self._console.is_terminal and not self._console.is_dumb_terminal
        self._ascii = not self._console.encoding.lower().startswith("utf")
        self._plain_bar = self._console.no_color or self._console.color_system is None

    @property
    def progress(self) -> RunProgress:
        return self._progress

    # -- input

    def feed(self, record: Mapping[str, Any]) -> None:
        """Take one record. Cheap: drawing happens in the panel's own thread."""
        with self._lock:
            finished = self._progress.feed(record)
        self._changed.set()
        if self._running and not self._interactive:
            self._say_lines(record, finished)

    def replay(self, reader: RunReader) -> None:
        """Take everything a run recorded so far, attempt by attempt, without printing lines for it."""
        records = [r for stream in ("metrics", "spans", "events") for r in reader.stream(stream)]
        records = [r for r in records if isinstance(r.get("m"), (int, float))]
        attempt = None
        with self._lock:
            for record in sorted(records, key=lambda r: (r["attempt"], r["m"])):
                if attempt is not None and record["attempt"] != attempt:
                    self._progress.begin_attempt()
                attempt = record["attempt"]
                self._progress.feed(record)
            # Whatever comes next is a live process with another clock, or nothing.
            self._progress.begin_attempt()

    # -- life

    def start(self) -> None:
        if self._running:
            return
        self._running = True
        self._stop.clear()
        if self._interactive:
            self._live = Live(
                self.render(), console=self._console, auto_refresh=False, vertical_overflow="crop"
            )
            self._live.start()
            self._thread = threading.Thread(
                target=self._draw, args=(self._live,), name="palestra-panel", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Draw the last state and leave it on the screen. Safe to call twice; a lost terminal is no error."""
        if not self._running:
            return
        self._running = False
        self._stop.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)
            self._thread = None
        live, self._live = self._live, None
        if live is not None:
            try:
                live.update(self.render())
                live.stop()
            except (
                OSError,
                SystemExit,
            ):  # rich exits on a closed pipe; the run's own end is not ours to choose
                self._quiet = True

    def __enter__(self) -> LivePanel:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _draw(self, live: Live) -> None:
        while True:
            self._changed.wait(_IDLE_S)
            self._changed.clear()
            if self._stop.is_set():
                return
            try:
                live.update(self.render(), refresh=True)
            except (OSError, SystemExit):  # the terminal is gone
                self._quiet = True
                return
            if self._stop.wait(REFRESH_S):
                return

    # -- plain lines

    def _say_lines(self, record: Mapping[str, Any], finished: StepLine | None) -> None:
        if finished is not None:
            self._print(self.line(finished))
        said = record.get("fields")
        if record.get("type") != "event" or not isinstance(said, Mapping):
            return
        kind = record.get("kind")
        if kind in ("notice", "dropped"):
            self._print(f"notice: {safe_text(self._progress.notice)}")
        elif kind == "eval" and (found := self._progress.evals.get(str(said.get("when")))):
            parts = [f"{name} {interval(found[name])}" for name in found]
            self._print(f"held-out {safe_text(str(said.get('when')), 20)}: {'  '.join(parts)}")
        elif kind == "state" and said.get("state") in ("starting", "starved"):
            reason = str(said.get("reason", ""))
            if self._progress.abstain_reason and "abstained" in reason:
                reason = reason.partition(":")[0]  # the step's own line says why
            self._print(f"{safe_text(str(said['state']), 20)}: {safe_text(reason)}")

    def line(self, finished: StepLine) -> str:
        """One finished step as one line of plain text."""
        values, total = finished.values, self._progress.steps
        parts = [f"step {finished.step}/{total}" if total else f"step {finished.step}"]
        parts.append(f"reward {values['reward/mean']:.3f}" if "reward/mean" in values else "reward -")
        if (rate := self._progress.tokens_per_s) is not None:
            parts.append(f"{rate:.0f} tokens/s")
        if "tokens/useful_fraction" in values:
            parts.append(f"useful {values['tokens/useful_fraction']:.0%}")
        if "groups/total" in values:
            parts.append(
                f"zero-variance {values.get('groups/zero_variance', 0):.0f}/{values['groups/total']:.0f}"
            )
        if finished.abstained:
            reason = safe_text(finished.abstain_reason, 100)
            parts.append(f"abstained {finished.abstained}" + (f" ({reason})" if reason else ""))
        if "train/loss" in values:
            parts.append(f"loss {values['train/loss']:.4g}")
        parts.append(f"{values['time/step_s']:.1f} s")
        if (left := self._progress.eta_s) is not None:
            parts.append(f"{duration(left)} left")
        return "  ".join(parts)

    def _print(self, text: str) -> None:
        if self._quiet:
            return
        file = self._console.file
        encoding = getattr(file, "encoding", None) or "utf-8"
        try:  # not through rich: it would wrap lines, and exit the process when the pipe closes
            file.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            file.flush()
        except (OSError, ValueError):  # the pipe closed, or the file did
            self._quiet = True

    # -- the panel

    def render(self) -> RenderableType:
        """The panel as it stands now."""
        with self._lock:
            now_m = time.monotonic() if self._running else None
            view = View(self._progress, min(self._console.width, 120), self._ascii, self._plain_bar)
            return view.panel(self._title, now_m)
