"""The exactly-once ledger: a pure state machine over durable entries, and its audit.

Entries of one step come in one order: *draws* (before anything is sampled),
*groups* (what came back), *update* (what was trained, or why nothing was).
*checkpoint* makes everything up to a step permanent; *attempt* says from which
step a restarted run goes on, and undoes what lay beyond it, exactly as the
trainer's restored state does. After any number of kills the surviving entries
must name every draw once, in order, with the task it always had, and apply each
step once. `Ledger.add` refuses an entry that could not have happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class EntryKind(StrEnum):
    ATTEMPT = "attempt"
    DRAWS = "draws"
    GROUPS = "groups"
    UPDATE = "update"
    CHECKPOINT = "checkpoint"


class LedgerError(ValueError):
    """An entry contradicts those before it."""


@dataclass(frozen=True, slots=True)
class Audit:
    """What the ledger proves. ``ok`` is the claim: nothing skipped, nothing repeated, and something done."""

    steps: int
    draws: int
    skipped: int
    repeated: int
    changed: int
    """Draws that named another task when they were replayed after a restart."""
    doubled_updates: int
    attempts: int
    undone_steps: int
    """Steps that were redone after a restart; their work was lost, their prompts were not."""

    @property
    def ok(self) -> bool:
        return self.steps > 0 and not (self.skipped or self.repeated or self.changed or self.doubled_updates)


@dataclass
class _Step:
    draws: list[int] = field(default_factory=list[int])
    tasks: list[str] = field(default_factory=list[str])
    groups: bool = False
    updated: bool = False
    version: int = 0


class Ledger:
    """Replays entries; knows the last complete step and whether the next entry is allowed."""

    def __init__(self, prompts_per_step: int) -> None:
        self._prompts_per_step = prompts_per_step
        self._steps: dict[int, _Step] = {}
        self._history: dict[int, set[str]] = {}
        self._attempts = 0
        self._undone = 0
        self._doubled = 0

    @property
    def step(self) -> int:
        """The last step whose update entry is in the ledger."""
        done = [s for s, row in self._steps.items() if row.updated]
        return max(done, default=0)

    def replay(self, entries: Iterable[Mapping[str, Any]]) -> Ledger:
        for entry in entries:
            self.add(entry)
        return self

    def add(self, entry: Mapping[str, Any]) -> None:
        """Take one entry. Raises LedgerError if it contradicts the ones before it."""
        try:
            kind, step = EntryKind(entry["kind"]), int(entry["step"])
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(f"not an entry: {dict(entry)} ({error})") from error
        if kind is EntryKind.ATTEMPT:
            self._attempt(step)
        elif kind is EntryKind.DRAWS:
            self._draws(step, [int(d) for d in entry["draws"]], [str(t) for t in entry["tasks"]])
        elif kind is EntryKind.GROUPS:
            self._row(step, kind).groups = True
        elif kind is EntryKind.UPDATE:
            self._update(step, int(entry["version"]))
        elif not self._row(step, kind).updated:
            raise LedgerError(f"checkpoint of step {step} before its update")

    def _row(self, step: int, kind: EntryKind) -> _Step:
        if step not in self._steps:
            raise LedgerError(f"{kind} of step {step} without its draws")
        return self._steps[step]

    def _attempt(self, resumed_from: int) -> None:
        if resumed_from > self.step:
            raise LedgerError(f"resumed from step {resumed_from}, but step {self.step} is the last done")
        beyond = [s for s in self._steps if s > resumed_from]
        self._undone += sum(self._steps[s].updated for s in beyond)
        for step in beyond:
            del self._steps[step]
        self._attempts += 1

    def _draws(self, step: int, draws: list[int], tasks: list[str]) -> None:
        if len(draws) != len(tasks):
            raise LedgerError(f"step {step}: {len(draws)} draws and {len(tasks)} tasks")
        if step != self.step + 1 or step in self._steps:
            raise LedgerError(f"draws of step {step} after step {self.step}")
        self._steps[step] = _Step(draws, tasks)
        for index, task in zip(draws, tasks, strict=True):
            self._history.setdefault(index, set()).add(task)

    def _update(self, step: int, version: int) -> None:
        row = self._row(step, EntryKind.UPDATE)
        if row.updated:
            self._doubled += 1
            raise LedgerError(f"step {step} was updated twice")
        if not row.groups:
            raise LedgerError(f"update of step {step} before its groups")
        row.updated = True
        row.version = version

    def audit(self) -> Audit:
        """What the surviving entries prove about steps 1 up to the last update."""
        steps = self.step
        expected = list(range(steps * self._prompts_per_step))
        found = [d for s in sorted(self._steps) if self._steps[s].updated for d in self._steps[s].draws]
        return Audit(
            steps=steps,
            draws=len(found),
            skipped=len(set(expected) - set(found)),
            repeated=len(found) - len(set(found)),
            changed=sum(len(tasks) > 1 for tasks in self._history.values()),
            doubled_updates=self._doubled,
            attempts=self._attempts,
            undone_steps=self._undone,
        )
