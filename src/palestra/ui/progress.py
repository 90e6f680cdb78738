"""What a run's records say about its progress: a pure fold over records.

`RunProgress.feed` takes records as a writer gives them to subscribers or a reader
reads them; it does no output and reads no clock. Every second since an attempt's
first record is in exactly one phase, ``other`` included, so the strip sums to the
run's time. Restarted runs are followed: a repeated step replaces what it redid.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from palestra.records.schema import special

Record = Mapping[str, Any]
PHASES = ("generate", "reward", "train", "sync", "checkpoint", "eval", "other")
"""``reward`` is what a step's rollouts waited for beside generation: rewards, tools, sandboxes."""
_RECENT = 10


@dataclass(slots=True)
class Interval:
    """A measured mean with its 95 % interval."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(slots=True)
class StepLine:
    """One finished step, as the plain output prints it."""

    step: int
    values: dict[str, float]
    abstained: int
    abstain_reason: str


@dataclass
class RunProgress:
    """State after all records fed so far."""

    steps: int = 0
    step: int = 0
    values: dict[str, float] = field(default_factory=dict)
    """The last value of every metric."""
    rewards: dict[int, float] = field(default_factory=dict)
    abstained: int = 0
    abstain_reason: str = ""
    state: str = ""
    state_reason: str = ""
    notice: str = ""
    evals: dict[str, dict[str, Interval]] = field(default_factory=dict)
    """``before`` / ``during`` / ``after`` -> ``sampled`` / ``greedy`` -> interval."""

    _spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    _open: dict[str, tuple[str, float]] = field(default_factory=dict)
    _rollout_s: float = 0.0
    """The last generate span, until its step's metrics divide it."""
    _elapsed_before_s: float = 0.0
    _first_m: float | None = None
    _last_m: float = 0.0
    _step_ends: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_RECENT + 1))
    _recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _step_abstained: dict[int, tuple[int, str]] = field(default_factory=dict)

    def begin_attempt(self) -> None:
        """The next records are a restarted process's: its monotonic clock has nothing to do with the last."""
        self._elapsed_before_s = self.elapsed_s()
        self._close_all(self._last_m)
        self._first_m = None
        self._step_ends.clear()
        self._recent.clear()

    def feed(self, record: Record) -> StepLine | None:
        """Take one record; returns the step it finishes, if it does. Unknown kinds are ignored."""
        moment = record.get("m")
        if not isinstance(moment, (int, float)) or record.get("process", "controller") != "controller":
            return None
        if self._first_m is None:
            self._first_m = self._last_m = moment
        self._last_m = max(self._last_m, moment)
        kind = record.get("type")
        if kind == "metrics":
            return self._metrics(record, moment)
        if kind == "span":
            self._span(record, moment)
        elif kind == "event":
            self._event(record)
        return None

    # -- metrics

    def _metrics(self, record: Record, moment: float) -> StepLine | None:
        raw = record.get("values")
        if not isinstance(raw, Mapping):
            return None
        values: dict[str, float] = {
            str(n): v for n, x in raw.items() if isinstance(v := special(x), (int, float))
        }
        self.values |= values
        step = record.get("step")
        if not isinstance(step, int) or not ("time/step_s" in values or "reward/mean" in values):
            return None
        if step <= self.step:
            self.rewards = {s: r for s, r in self.rewards.items() if s < step}
        self.step = step
        if "reward/mean" in values:
            self.rewards[step] = values["reward/mean"]
        self._move_reward_time(values)
        if "time/step_s" not in values:
            return None
        self._step_ends.append((step, moment))
        self._recent.append((values.get("tokens/sampled", 0.0), values["time/step_s"]))
        count, reason = self._step_abstained.pop(step, (int(values.get("abstained", 0.0)), ""))
        return StepLine(step, values, count, reason)

    def _move_reward_time(self, values: Mapping[str, float]) -> None:
        """The generate span holds the whole rollout; what the engine did not work is the rewards' time."""
        busy = values.get("time/generate_s")
        if busy is not None and math.isfinite(busy):
            waited = min(max(0.0, self._rollout_s - busy), self._spent["generate"])
            self._spent["generate"] -= waited
            self._spent["reward"] += waited
        self._rollout_s = 0.0

    # -- spans

    def _span(self, record: Record, moment: float) -> None:
        name, key = record.get("name"), str(record.get("id"))
        if record.get("phase") == "open" and name in PHASES:
            self._open[key] = (str(name), moment)
        elif key in self._open:
            name, since = self._open.pop(key)
            self._spent[name] += max(0.0, moment - since)
            if name == "generate":
                self._rollout_s = max(0.0, moment - since)

    def _close_all(self, moment: float) -> None:
        for name, since in self._open.values():
            self._spent[name] += max(0.0, moment - since)
        self._open.clear()

    def elapsed_s(self, now_m: float | None = None) -> float:
        """Seconds of all attempts, up to the last record or to ``now_m`` of the live attempt's clock."""
        if self._first_m is None:
            return self._elapsed_before_s
        return self._elapsed_before_s + max(0.0, (self._last_m if now_m is None else now_m) - self._first_m)

    def phases(self, now_m: float | None = None) -> dict[str, float]:
        """Seconds per phase; they sum to ``elapsed_s`` unless phases overlapped."""
        end = self._last_m if now_m is None else now_m
        spent = dict(self._spent)
        for name, since in self._open.values():
            spent[name] += max(0.0, end - since)
        spent["other"] = max(0.0, self.elapsed_s(now_m) - sum(spent.values()))
        return spent

    # -- events

    def _event(self, record: Record) -> None:
        said = record.get("fields")
        if not isinstance(said, Mapping):
            return
        match record.get("kind"):
            case "state":
                self.state, self.state_reason = str(said.get("state", "")), str(said.get("reason", ""))
            case "notice":
                self.notice = str(said.get("text", ""))
            case "dropped":
                self.notice = f"{said.get('count')} records were dropped: {said.get('reason')}"
            case "abstain":
                self._abstain(record.get("step"), said)
            case "eval":
                self._eval(said)
            case _:
                pass

    def _abstain(self, step: Any, said: Mapping[str, Any]) -> None:
        count = said.get("count")
        count = count if isinstance(count, int) else 1
        self.abstained += count
        self.abstain_reason = f"{said.get('boundary', '?')}: {said.get('reason', '')}"
        if isinstance(step, int):
            before = self._step_abstained.get(step, (0, ""))[0]
            self._step_abstained = {step: (before + count, self.abstain_reason)}

    def _eval(self, said: Mapping[str, Any]) -> None:
        found: dict[str, Interval] = {}
        for name in ("sampled", "greedy"):
            numbers = said.get(name)
            if isinstance(numbers, list) and len(numbers) == 4:
                mean, low, high, n = (special(x) for x in numbers)
                if all(isinstance(x, (int, float)) for x in (mean, low, high, n)):
                    found[name] = Interval(mean, low, high, int(n))
        if found:
            self.evals[str(said.get("when"))] = found

    # -- rates

    @property
    def eta_s(self) -> float | None:
        """Seconds to the last step at the recent pace, checkpoints and evaluations included."""
        if len(self._step_ends) < 2 or not self.steps:
            return None
        (first, start), (last, end) = self._step_ends[0], self._step_ends[-1]
        if last <= first or end <= start:
            return None
        return max(0, self.steps - last) * (end - start) / (last - first)

    @property
    def tokens_per_s(self) -> float | None:
        """Sampled tokens per second of step time, over the recent steps."""
        seconds = sum(s for _, s in self._recent)
        return sum(t for t, _ in self._recent) / seconds if seconds > 0 else None
