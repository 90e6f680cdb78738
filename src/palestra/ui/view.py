"""How a run's progress looks: one rich panel for any width, colour or none.

Pure: progress in, renderable out. Everything is built from `Text` objects, never
from markup, and every foreign string passes `safe_text`. Items are never parted
from their numbers: what does not fit beside moves below. Where there is no colour
the strip is made of letters; where there is no UTF-8, of ASCII.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import ASCII, ROUNDED
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from palestra.ui.progress import PHASES, Interval, RunProgress
from palestra.ui.sparkline import apportion, duration, sparkline
from palestra.ui.text import safe_text

_STYLES = {"generate": "cyan", "reward": "yellow", "train": "green", "sync": "magenta", "checkpoint": "blue",
           "eval": "bright_blue", "other": "bright_black"}  # fmt: skip
_LETTERS: dict[str, str] = dict(zip(PHASES, "GRTSCE.", strict=True))
_WORDS = {"reward": "reward+sandbox"}
_BAR = 60
_NARROW = 50


class View:
    """One drawing of ``progress``, ``width`` columns wide."""

    def __init__(self, progress: RunProgress, width: int, ascii_only: bool, colourless: bool) -> None:
        self._p = progress
        self._width = width
        self._ascii = ascii_only
        self._letters = ascii_only or colourless
        self._arrow = "->" if ascii_only else "→"
        self._label = 8 if width >= _NARROW else 6
        self._room = max(8, width - 4 - self._label - 1)

    def panel(self, title: str, now_m: float | None) -> Panel:
        """The whole panel; ``now_m`` is the monotonic now of a live run, None for one that stands still."""
        p = self._p
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_column(width=self._label, no_wrap=True, overflow="crop", style="bold")
        grid.add_column(width=self._room, overflow="fold")
        grid.add_row("step", self._step())
        grid.add_row("reward", self._reward())
        grid.add_row("time", self._time(p.phases(now_m)))
        if "tokens/sampled" in p.values:
            grid.add_row("tokens", self._flow(self._tokens()))
        if "groups/total" in p.values or p.abstained:
            grid.add_row("groups", self._flow(self._groups()))
        if p.evals:
            grid.add_row("held-out" if self._label == 8 else "eval", self._held_out())
        grid.add_row("state", self._flow(self._state(now_m)))
        if p.notice:
            grid.add_row("notice", Text(self._safe(p.notice), style="yellow"))
        return Panel(
            grid,
            title=self._title(title),
            title_align="left",
            box=ASCII if self._ascii else ROUNDED,
            width=self._width,
        )

    def _safe(self, text: str, limit: int = 200) -> str:
        shown = safe_text(text, limit)
        return shown.encode("ascii", "replace").decode("ascii") if self._ascii else shown

    def _title(self, title: str) -> Text:
        """The title, cut here: rich would end it with an ellipsis that not every terminal has."""
        text = Text(f"palestra {'-' if self._ascii else '·'} {self._safe(title, 120)}", no_wrap=True)
        text.truncate(max(1, self._width - 6), overflow="crop" if self._ascii else "ellipsis")
        return text

    def _flow(self, items: Sequence[Text]) -> Text:
        """Items side by side, two spaces apart, each below where it would not fit."""
        lines, used = Text(), 0
        for item in items:
            needed = item.cell_len
            if used and used + 2 + needed <= self._room:
                lines.append("  ")
                used += 2 + needed
            else:
                lines.append("\n" if used else "")
                used = needed
            lines.append_text(item)
        return lines

    def _step(self) -> Text:
        p = self._p
        total = max(p.steps, p.step)
        head = f"{p.step}/{total} "
        left = "" if p.eta_s is None else f" {duration(p.eta_s)} left"
        bar = max(0, min(48, self._room - len(head) - len(left)))
        done = 0 if total == 0 else round(bar * p.step / total)
        full, empty = ("#", ".") if self._letters else ("━", "━")
        text = Text.assemble(head, (full * done, "green"), (empty * (bar - done), "bright_black"), left)
        text.truncate(self._room)
        return text

    def _reward(self) -> Text:
        rewards = list(self._p.rewards.values())
        if not rewards:
            return Text("no step yet", style="bright_black")
        numbers = f"{rewards[0]:.3f} " + (f"{self._arrow} {rewards[-1]:.3f} " if len(rewards) > 1 else "")
        line = sparkline(rewards, min(_BAR, self._room - len(numbers)), ascii_only=self._ascii)
        text = Text.assemble(numbers, (line, "cyan"))
        text.truncate(self._room)
        return text

    def _time(self, phases: Mapping[str, float]) -> RenderableType:
        shares, percent = apportion(phases, min(_BAR, self._room)), apportion(phases, 100)
        if not any(shares.values()):
            return Text("nothing measured yet", style="bright_black")
        strip = Text()
        for name in PHASES:
            strip.append((_LETTERS[name] if self._letters else "█") * shares[name], _STYLES[name])
        shown = [name for name in PHASES if percent[name] or shares[name]]
        return Group(strip, self._flow([self._key(name, percent[name]) for name in shown]))

    def _key(self, name: str, percent: int) -> Text:
        mark = _LETTERS[name] if self._letters else "■"
        return Text.assemble((mark, _STYLES[name]), f" {_WORDS.get(name, name)} {percent}%")

    def _tokens(self) -> list[Text]:
        values, rate = self._p.values, self._p.tokens_per_s
        parts = [] if rate is None else [f"{rate:,.0f} tokens/s"]
        if "tokens/useful_fraction" in values:
            parts.append(f"{values['tokens/useful_fraction']:.0%} useful")
        if "completion/length_mean" in values:
            parts.append(f"{values['completion/length_mean']:.0f} per completion")
        return [Text(part) for part in parts]

    def _groups(self) -> list[Text]:
        p, parts = self._p, list[Text]()
        if "groups/total" in p.values:
            zero, total = p.values.get("groups/zero_variance", 0.0), p.values["groups/total"]
            style = "yellow" if zero >= 0.5 * total else ""
            parts.append(Text(f"{zero:.0f}/{total:.0f} zero-variance", style))
        if p.abstained:
            parts.append(Text(f"{p.abstained} abstained", "red"))
            parts.append(Text(f"last: {self._safe(p.abstain_reason, 120)}"))
        return parts

    def _held_out(self) -> Text:
        later = self._p.evals.get("after") or self._p.evals.get("during")
        first = self._p.evals.get("before") or later or {}
        rows: list[Text] = []
        for name in first:
            items = [Text(f"{name:<7} {interval(first[name])}")]
            if later and later is not first and name in later:
                text = f"{self._arrow} {interval(later[name])}"
                beside = items[0].cell_len + 2 + len(text) <= self._room
                items.append(Text(text if beside else f"{text:>{items[0].cell_len}}", style="bold green"))
            rows.append(self._flow(items))
        return Text("\n").join(rows)

    def _state(self, now_m: float | None) -> list[Text]:
        p = self._p
        if not p.state:
            return [Text("waiting for records")]
        reason = self._safe(p.state_reason)
        style = "yellow" if p.state == "starved" else "bold"
        text = Text.assemble((self._safe(p.state, 30), style), f": {reason}" if reason else "")
        return [text, Text(f"after {duration(p.elapsed_s(now_m))}", style="bright_black")]


def interval(value: Interval) -> str:
    """``0.417 [0.371, 0.463]``."""
    return f"{value.mean:.3f} [{value.low:.3f}, {value.high:.3f}]"
