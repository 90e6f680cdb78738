"""What a finished or stopped run amounts to, as text: read from its records, never from memory.

Everything printed here can be printed again later from a copied run directory.
Sampled and greedy results stand apart, each with its 95 % interval over tasks, and
the sentence about them claims no more than the intervals do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from palestra.records.reader import RunReader

Rows = Sequence[Mapping[str, Any]]


def _measured(evals: Rows, when: str) -> Mapping[str, Any] | None:
    """The last evaluation of that moment."""
    return next((e for e in reversed(evals) if e.get("when") == when), None)


def _shown(interval: Mapping[str, Any] | None) -> str:
    if interval is None:
        return "not measured"
    return f"{interval['mean']:.3f}  [{interval['low']:.3f}, {interval['high']:.3f}]"


def _row(name: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, key: str) -> str:
    first = _shown(before.get(key) if before else None)
    last = _shown(after.get(key) if after else None)
    return f"  {name:<9} {first:<24} ->  {last}"


def verdict_sentence(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> str:
    """What the sampled intervals allow to say."""
    if not (before and after and before.get("sampled") and after.get("sampled")):
        return "Held-out reward was not measured both before and after training."
    if before.get("tasks") != after.get("tasks"):
        return f"Not comparable: {before.get('tasks')} were scored before, {after.get('tasks')} after."
    first, last = before["sampled"], after["sampled"]
    if last["low"] > first["high"]:
        return "The sampled held-out reward rose, and its 95 % intervals do not overlap."
    if last["high"] < first["low"]:
        return "The sampled held-out reward fell, and its 95 % intervals do not overlap."
    return "The 95 % intervals of the sampled held-out reward overlap: no change is shown."


def _training(reader: RunReader) -> list[str]:
    rewards = reader.series("reward/mean")
    if not rewards:
        return []
    useful = [value for _, value in reader.series("tokens/useful_fraction")]
    seconds = sum(value for _, value in reader.series("time/step_s"))
    tokens = sum(value for _, value in reader.series("tokens/sampled"))
    lines = [
        f"  training  reward {rewards[0][1]:.3f} (step {rewards[0][0]:.0f}) -> "
        f"{rewards[-1][1]:.3f} (step {rewards[-1][0]:.0f})"
    ]
    if useful and seconds:
        lines.append(
            f"  tokens    {tokens:.0f} sampled, {100 * sum(useful) / len(useful):.0f} % useful a step, "
            f"{tokens / seconds:.0f} tokens/s over whole steps"
        )
    return lines


def _lost_records(reader: RunReader) -> list[str]:
    """What is missing from the records that the rest was read from."""
    kept = reader.info().get("lost_records")
    rows = [(row.get("attempt"), row.get("dropped"), row.get("why")) for row in kept or () if row]
    if not rows:  # a killed attempt said it in its events only
        told = {(e["attempt"], e["process"]): e.get("fields", {}) for e in reader.events("dropped")}
        rows = [(attempt, said.get("count"), said.get("reason")) for (attempt, _), said in told.items()]
    return [f"  records   incomplete: {n} dropped in attempt {attempt}: {why}" for attempt, n, why in rows]


def summary_of(reader: RunReader) -> str:
    """The run's state, held-out results, training reward and newest checkpoint, one per line."""
    state, reason = reader.state()
    evals = reader.evals()
    before, after = _measured(evals, "before"), _measured(evals, "after")
    lines = [f"run {reader.path.name}: {state}" + (f" ({reason})" if reason else "")]
    if before or after:
        count = (after or before or {}).get("sampled") or {}
        lines.append(
            f"  held-out  before                   ->  after    ({count.get('n', '?')} tasks, 95 % intervals)"
        )
        lines.append(_row("sampled", before, after, "sampled"))
        lines.append(_row("greedy", before, after, "greedy"))
        lost = [(e or {}).get("abstained", 0) for e in (before, after)]
        if any(lost):
            lines.append(f"  abstained {lost[0]:<24} ->  {lost[1]}   (episodes without a verdict, left out)")
    lines += _training(reader)
    done = [path for _, path, complete in reader.checkpoints() if complete]
    if done:
        lines.append(f"  model     {done[-1]}  (Hugging Face layout)")
    lines += _lost_records(reader)
    if before and after:
        lines.append(f"  {verdict_sentence(before, after)}")
    return "\n".join(lines)
