"""The controller against fakes: what a run does, how it stops, and that a crash anywhere loses nothing."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.declared import Declared
from helpers.fakes import FakeTrainer, MirrorEngine
from helpers.trajectories import trajectory
from palestra.algorithms.recipe import Recipe
from palestra.errors import RunStopped, WeightsError
from palestra.job import Checkpoints, EngineConfig, Evaluation, Job, Limits, TrainerConfig
from palestra.loop import checkpoints
from palestra.loop.controller import Controller, Pillars
from palestra.loop.ledger import Ledger
from palestra.presets import GRPO
from palestra.types import Outcome, SamplingParams, Task, Trajectory
from palestra.weights.sync import WeightSync

TASKS = [Task(prompt=f"question {i}", id=f"q{i}") for i in range(5)]
HELD_OUT = [Task(prompt=f"held out {i}", id=f"h{i}") for i in range(2)]


class Crash(BaseException):
    """Stands for kill -9: nothing in the code under test may catch it."""


class Disk:
    """What survives a crash: the ledger's entries and the evaluations. Crashes on demand."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.evals: list[dict[str, Any]] = []
        self.states: list[tuple[str, str]] = []
        self.values: list[tuple[int | None, dict[str, float]]] = []
        self.rollouts: list[tuple[str, float | None]] = []
        self.abstained: list[Mapping[str, Any]] = []
        self.crash_at: int | None = None
        self.writes = 0

    def _write(self) -> None:
        self.writes += 1
        if self.crash_at is not None and self.writes >= self.crash_at:
            raise Crash

    def ledger(self, entry: Mapping[str, Any]) -> None:
        self._write()
        self.entries.append(dict(entry))
        self._write()

    def evaluation(self, entry: Mapping[str, Any]) -> None:
        self._write()
        self.evals.append(dict(entry))

    def metrics(self, values: Mapping[str, float], *, step: int | None, version: int | None) -> None:
        self.values.append((step, dict(values)))

    @contextlib.contextmanager
    def span(self, name: str, **_: Any) -> Iterator[None]:
        self._write()
        yield
        self._write()

    def flush(self, timeout_s: float = 5) -> bool:
        self._write()
        return True

    def event(self, kind: str, *, step: int | None = None, **fields: Any) -> None:
        if kind == "state":
            self.states.append((fields["state"], fields["reason"]))
        if kind == "abstain":
            self.abstained.append(fields)

    def rollout(self, made: Trajectory, *, advantage: float | None, **_: Any) -> None:
        self.rollouts.append((made.id, advantage))


class Nothing(Declared):
    """Never run: the episode runner is a fake."""


def outcome_by_seed(name: str, seed: int) -> Outcome | float | None:
    return float(seed % 3 == 0)


def make_job(**changes: Any) -> Job:
    settings: dict[str, Any] = {
        "model": "./model", "environment": Nothing(), "name": "r", "steps": 6, "prompts_per_step": 2,
        "algorithm": GRPO(group_size=4, advantage="mean"), "checkpoints": Checkpoints(every_steps=2, keep=2),
        "evaluation": Evaluation(samples_per_task=1),
    }  # fmt: skip
    return Job(**{**settings, **changes})


class Attempt:
    """One process's try at the run in ``root``: builds everything anew, restores what was committed."""

    def __init__(
        self, root: Path, disk: Disk, job: Job, outcome: Any = outcome_by_seed, **trainer: Any
    ) -> None:
        self.disk = disk
        self.trainer = FakeTrainer(**trainer)
        self.engine = MirrorEngine()
        found = checkpoints.committed(root)
        checkpoints.sweep(root)
        step = 0
        if found:
            self.trainer.load_state(found[-1].trainer_folder)
            step = found[-1].step

        async def episode(task: Task, name: str, sampling: SamplingParams) -> Trajectory:
            return trajectory(name, outcome(name, sampling.seed), task=task, version=self.trainer.updates)

        algorithm = job.algorithm.model_dump(exclude={"group_size", "reference"})
        pillars = Pillars(
            self.engine, self.trainer, WeightSync(self.trainer, self.engine, (1, 2, 3), "fp32"), episode,
            Recipe.named(**algorithm), lambda t: ("prompt", "reply"), disk,  # type: ignore[arg-type]
        )  # fmt: skip
        ledger = Ledger(job.prompts_per_step).replay(disk.entries)
        self.controller = Controller(job, "r", TASKS, HELD_OUT, pillars, ledger, step, root)

    async def run(self) -> bool:
        done = frozenset((str(e["when"]), int(e["step"])) for e in self.disk.evals)
        return await self.controller.run(done)


async def test_a_run_trains_every_step_evaluates_twice_and_keeps_checkpoints(tmp_path: Path) -> None:
    disk = Disk()
    attempt = Attempt(tmp_path, disk, make_job())
    assert await attempt.run()
    audit = Ledger(2).replay(disk.entries).audit()
    assert audit.ok
    assert audit.steps == 6
    assert [(e["when"], e["step"]) for e in disk.evals] == [("before", 0), ("after", 6)]
    assert [c.step for c in checkpoints.committed(tmp_path)] == [4, 6]
    assert attempt.engine.version is not None
    assert attempt.engine.version.number == attempt.trainer.updates
    assert torch.equal(attempt.engine.weight, attempt.trainer.weight)


async def test_every_rollout_is_recorded_with_its_advantage(tmp_path: Path) -> None:
    disk = Disk()
    await Attempt(tmp_path, disk, make_job(steps=2, evaluation=Evaluation(before=False, after=False))).run()
    assert [name for name, _ in disk.rollouts] == [f"g{g}.{m}" for g in range(4) for m in range(4)]
    assert all(advantage is not None for _, advantage in disk.rollouts)


async def test_every_trained_step_reports_all_clocks_and_bins(tmp_path: Path) -> None:
    disk = Disk()
    await Attempt(tmp_path, disk, make_job()).run()
    for step in range(1, 7):
        values = {k: v for s, row in disk.values if s == step for k, v in row.items()}
        assert {"reward/mean", "time/step_s", "tokens/useful_fraction", "train/loss"} <= set(values) or (
            values["groups/zero_variance"] == 2
        )
        parts = values["tokens/trained"] + values["tokens/zero_advantage"] + values["tokens/abstained"]
        assert parts == values["tokens/sampled"]


@pytest.mark.parametrize("crash_at", range(1, 75, 3))
async def test_a_crash_at_any_write_loses_repeats_and_changes_nothing(tmp_path: Path, crash_at: int) -> None:
    """NeMo-RL PR#3599, TRL PR#7294 (case 28): nothing is skipped, repeated or doubled."""
    undisturbed, whole = Disk(), tmp_path / "whole"
    reference = Attempt(whole, undisturbed, make_job())
    await reference.run()
    disk, root = Disk(), tmp_path / "crashed"
    disk.crash_at = crash_at
    for tries in itertools.count(1):
        attempt = Attempt(root, disk, make_job())
        try:
            assert await attempt.run()
            break
        except Crash:
            disk.crash_at = disk.writes + 7 + 11 * tries if tries < 4 else None
    audit = Ledger(2).replay(disk.entries).audit()
    assert audit.ok
    assert audit.steps == 6
    assert audit.attempts <= tries, "an attempt that died before its first write left no trace"
    assert torch.equal(attempt.trainer.weight, reference.trainer.weight), (
        "bit for bit where it would have been"
    )
    assert attempt.trainer.updates == reference.trainer.updates
    assert losses(disk) == losses(undisturbed)
    assert sorted({e["when"] for e in disk.evals}) == ["after", "before"]


def losses(disk: Disk) -> dict[int, float]:
    """The surviving loss of each step."""
    return {e["step"]: e.get("loss", 0.0) for e in disk.entries if e["kind"] == "update"}


async def test_a_step_whose_groups_are_all_equal_is_a_visible_state_and_trains_nothing(
    tmp_path: Path,
) -> None:
    disk = Disk()
    job = make_job(steps=2, evaluation=Evaluation(before=False, after=False))
    attempt = Attempt(tmp_path, disk, job, lambda name, seed: 1.0)
    assert await attempt.run()
    starved = [reason for state, reason in disk.states if state == "starved"]
    assert len(starved) == 2
    assert "all rewards are equal (values 1)" in starved[0]
    assert attempt.trainer.steps == []
    assert [e["applied"] for e in disk.entries if e["kind"] == "update"] == [False, False]


async def test_a_run_that_stays_starved_stops_and_says_why(tmp_path: Path) -> None:
    disk = Disk()
    attempt = Attempt(tmp_path, disk, make_job(limits=Limits(max_starved_steps=3)), lambda name, seed: 0.0)
    with pytest.raises(RunStopped) as caught:
        await attempt.run()
    assert "3 steps in a row taught nothing" in str(caught.value)
    assert "limits.max_starved_steps" in str(caught.value)
    assert attempt.controller.step == 3
    assert [c.step for c in checkpoints.committed(tmp_path)] == [2, 3]


async def test_a_first_step_of_failures_stops_at_once_with_the_cause(tmp_path: Path) -> None:
    """NeMo-Gym#1351 (case 16): the judge died, reward collapsed, and training went on."""
    disk = Disk()
    attempt = Attempt(tmp_path, disk, make_job(evaluation=Evaluation(before=False)), lambda name, seed: None)
    with pytest.raises(RunStopped) as caught:
        await attempt.run()
    assert "no episode of the first step got a reward" in str(caught.value)
    assert "Traceback: boom" in str(caught.value)
    assert checkpoints.committed(tmp_path) == [], "the mended run starts from the beginning"


async def test_some_abstentions_shrink_their_group_and_never_count_as_zero(tmp_path: Path) -> None:
    """NeMo-Gym PR#2552 (case 14): faults injected into episodes leave the baselines unmoved."""

    def flaky(name: str, seed: int) -> float | None:
        return None if name.endswith(".3") else 1.0 if name.endswith(".0") else 0.0

    disk = Disk()
    job = make_job(steps=1, evaluation=Evaluation(before=False, after=False))
    await Attempt(tmp_path, disk, job, flaky).run()
    advantages = {name: value for name, value in disk.rollouts if name.startswith("g0.")}
    third = pytest.approx(-1 / 3)
    assert advantages == {"g0.0": pytest.approx(2 / 3), "g0.1": third, "g0.2": third, "g0.3": None}
    assert [a["count"] for a in disk.abstained] == [2]
    assert disk.abstained[0]["boundary"] == "engine"


async def test_updates_that_are_not_finite_are_skipped_and_stop_the_run_after_a_few(tmp_path: Path) -> None:
    disk = Disk()
    job = make_job(trainer=TrainerConfig(max_skipped_updates=1), evaluation=Evaluation(before=False))
    attempt = Attempt(tmp_path, disk, job, lambda name, seed: float(name.endswith(".0")), finite=False)
    with pytest.raises(RunStopped, match="2 updates in a row were skipped"):
        await attempt.run()
    assert attempt.trainer.updates == 0
    assert [e["applied"] for e in disk.entries if e["kind"] == "update"] == [False, False]


async def test_asked_to_stop_it_finishes_the_step_and_checkpoints(tmp_path: Path) -> None:
    disk = Disk()

    def outcome(name: str, seed: int) -> float:
        if name == "g4.0":
            attempt.controller.stop.set()
        return float(name.endswith(".0"))

    attempt = Attempt(tmp_path, disk, make_job(), outcome)
    assert not await attempt.run()
    assert attempt.controller.step == 3
    assert [c.step for c in checkpoints.committed(tmp_path)][-1] == 3
    assert [e["when"] for e in disk.evals] == ["before"]
    again = Attempt(tmp_path, disk, make_job(), lambda name, seed: float(name.endswith(".0")))
    assert await again.run()
    audit = Ledger(2).replay(disk.entries).audit()
    assert audit.ok
    assert audit.undone_steps == 0


async def test_evaluation_during_training_uses_no_training_prompt_and_no_draw(tmp_path: Path) -> None:
    disk = Disk()
    job = make_job(evaluation=Evaluation(every_steps=2, samples_per_task=1))
    await Attempt(tmp_path, disk, job).run()
    assert [(e["when"], e["step"]) for e in disk.evals] == [
        ("before", 0), ("during", 2), ("during", 4), ("after", 6),
    ]  # fmt: skip
    assert Ledger(2).replay(disk.entries).audit().draws == 12


async def test_an_evaluation_of_nothing_but_failures_stops_and_does_not_count_as_done(tmp_path: Path) -> None:
    """NeMo-Gym#1351 (case 16): a dead judge is said at once, and the mended run measures again."""
    disk = Disk()
    with pytest.raises(RunStopped) as caught:
        await Attempt(tmp_path, disk, make_job(), lambda name, seed: None).run()
    assert "no episode of the evaluation before training got a reward: the engine broke" in str(caught.value)
    assert disk.evals == []
    assert await Attempt(tmp_path, disk, make_job()).run()
    assert [(e["when"], e["step"]) for e in disk.evals] == [("before", 0), ("after", 6)]


async def test_steps_lost_to_failures_are_sampled_again(tmp_path: Path) -> None:
    """SkyRL#1173, NeMo-RL PR#3599 (cases 20, 28): an outage must not use up prompts that nobody trained."""

    def outage(name: str, seed: int) -> float | None:
        draw = int(name.split(".")[0][1:]) if name.startswith("g") else 0
        return None if draw >= 6 else float(name.endswith(".0"))

    disk, job = Disk(), make_job(steps=5, limits=Limits(max_starved_steps=9))
    first = Attempt(tmp_path, disk, job, outage)
    assert not await first.run(), "a run whose last steps all abstained is not finished"
    assert (first.controller.step, first.controller.kept_step) == (5, 3)
    assert checkpoints.committed(tmp_path)[-1].step == 3
    again = Attempt(tmp_path, disk, job, lambda name, seed: float(name.endswith(".0")))
    assert await again.run()
    trained = [e["step"] for e in disk.entries if e["kind"] == "update" and e["applied"]]
    assert trained == [1, 2, 3, 4, 5]
    assert Ledger(2).replay(disk.entries).audit().ok


async def test_tokens_of_another_version_are_never_trained(tmp_path: Path) -> None:
    """AReaL PR#1388 (case 22): a stale sample in a run that corrects for none is an error, not a curve."""
    disk = Disk()
    attempt = Attempt(tmp_path, disk, make_job(evaluation=Evaluation(before=False)))

    async def stale(task: Task, name: str, sampling: SamplingParams) -> Trajectory:
        return trajectory(name, float(name.endswith(".0")), task=task, version=0)

    object.__setattr__(attempt.controller._p, "episode", stale)
    with pytest.raises(WeightsError, match=r"trains version 1, but tokens were sampled by versions \[0\]"):
        await attempt.run()


async def test_several_updates_of_one_step_keep_the_ratio_to_the_first_policy(tmp_path: Path) -> None:
    disk = Disk()
    job = make_job(
        steps=1, algorithm=GRPO(group_size=4, updates_per_step=3), evaluation=Evaluation(before=False)
    )
    attempt = Attempt(tmp_path, disk, job, lambda name, seed: float(name.endswith(".0")))
    before = attempt.trainer.weight
    await attempt.run()
    assert attempt.trainer.updates == 3
    batches = attempt.trainer.steps
    assert len(batches) == 3
    assert all(batch is batches[0] for batch in batches), "the same samples, packed once"
    old = batches[0].old_logprobs_N
    assert old is not None
    assert not torch.equal(attempt.trainer.weight, before)
    assert attempt.engine.version is not None
    assert attempt.engine.version.number == 3


async def test_more_episodes_than_places_begin_in_order(tmp_path: Path) -> None:
    disk = Disk()
    job = make_job(steps=1, engine=EngineConfig(max_running=1), evaluation=Evaluation(before=False))
    attempt = Attempt(tmp_path, disk, job, lambda name, seed: float(name.endswith(".0")))
    assert await attempt.run()
    assert [name for name, _ in disk.rollouts][:8] == [f"g{g}.{m}" for g in range(2) for m in range(4)]
