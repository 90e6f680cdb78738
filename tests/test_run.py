"""Whole runs with a tiny model: what a user starts, breaks, stops and continues."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny import make_tiny_model
from palestra.environments.base import Environment
from palestra.environments.single_turn import SingleTurn
from palestra.errors import (
    ChatError,
    ConfigError,
    ModelSourceError,
    PalestraError,
    RecordError,
    RunStopped,
    TaskError,
)
from palestra.job import Checkpoints, Deadlines, Evaluation, Job, Optimizer, Sampling, TrainerConfig
from palestra.presets import GRPO
from palestra.run import Run, train
from palestra.sandboxes.base import SandboxSpec
from palestra.settings import resolve
from palestra.types import Abstain, Reward, Task


def tasks(count: int = 6, prefix: str = "question") -> list[Task]:
    return [Task(prompt=f"{prefix} {i}") for i in range(count)]


def length_reward(task: Task, reply: str) -> float:
    """Varies within a group, and is the same for the same reply."""
    return zlib.crc32(reply.encode()) / 2**32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Callable[..., Job]:
    def build(reward: Any = length_reward, environment: Environment | None = None, **changes: Any) -> Job:
        settings: dict[str, Any] = {
            "model": str(model),
            "environment": environment or SingleTurn(tasks(), reward, evaluation_tasks=tasks(2, "held out")),
            "name": "tiny", "runs_dir": tmp_path / "runs", "steps": 3, "prompts_per_step": 2, "threads": 1,
            "algorithm": GRPO(group_size=4), "sampling": Sampling(max_new_tokens=5),
            "optimizer": Optimizer(learning_rate=1e-3), "checkpoints": Checkpoints(every_steps=2, keep=2),
            "evaluation": Evaluation(samples_per_task=2),
        }  # fmt: skip
        return Job(**{**settings, **changes})

    return build


def losses(run: Run) -> list[float]:
    return [value for _, value in run.records.series("train/loss")]


def final_weights(run: Run) -> dict[str, torch.Tensor]:
    from palestra.models.tensors import load_tensors

    return load_tensors(run.checkpoints()[-1])


def same_weights(one: Run, two: Run) -> bool:
    first, second = final_weights(one), final_weights(two)
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def test_a_run_ends_with_records_a_proof_and_a_model_that_transformers_loads(
    make: Callable[..., Job],
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = make().train(panel=False)
    assert run.status == "finished"
    assert run.audit().ok
    assert run.audit().steps == 3
    records = run.records
    assert len(list(records.rollouts(split="train"))) == 24
    assert [e["when"] for e in records.evals()] == ["before", "after"]
    assert len(records.series("reward/mean")) == 3
    folder = run.checkpoints()[-1]
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for name, tensor in final_weights(run).items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)


def test_training_moved_the_weights_that_the_engine_then_sampled_with(
    make: Callable[..., Job], model: Path
) -> None:
    """verl#7495 (case 1): every sync is proven; versions of the sampled tokens follow the trainer's."""
    from palestra.models.tensors import load_tensors

    run = make().train(panel=False)
    before = load_tensors(model)
    assert any(not torch.equal(before[name], tensor) for name, tensor in final_weights(run).items())
    versions = {record["step"]: set(run.records.tokens(record).versions) - {-1}
                for record in run.records.rollouts(split="train")}  # fmt: skip
    assert versions == {1: {0}, 2: {1}, 3: {2}}
    gaps = [value for _, value in run.records.series("sync/probe_gap_max")]
    assert gaps
    assert max(gaps) < 1e-3


def test_the_engines_logprobs_are_the_trainers(make: Callable[..., Job]) -> None:
    """trl#4159, NeMo-RL PR#316, OpenRLHF PR#853 (case 10): temperature applied on one side only."""
    for temperature in (0.6, 1.0, 1.3):
        for top in ({}, {"top_k": 20}, {"top_p": 0.9}):
            sampling = Sampling(max_new_tokens=5, temperature=temperature, **top)
            name = f"t{temperature}{'-'.join(top)}"
            job = make(
                sampling=sampling, name=name, steps=1, evaluation=Evaluation(before=False, after=False)
            )
            mismatch = [value for _, value in job.train(panel=False).records.series("train/mismatch_max")]
            assert len(mismatch) == 1
            assert mismatch[0] < 1e-3, (temperature, top)


def test_the_same_job_gives_the_same_losses_bit_for_bit(make: Callable[..., Job]) -> None:
    one, two = make(name="one").train(panel=False), make(name="two").train(panel=False)
    assert losses(one) == losses(two)
    assert same_weights(one, two)


def test_a_stopped_run_continues_to_where_it_would_have_been(make: Callable[..., Job]) -> None:
    """NeMo-RL PR#3599, PR#3480, TRL PR#7294 (case 28)."""
    whole = make(name="whole", steps=4).train(panel=False)
    parts = make(name="parts", steps=3).train(panel=False)
    parts = make(name="parts", steps=4).train(panel=False)
    assert parts.status == "finished"
    assert parts.audit().ok
    assert parts.audit().attempts == 2
    assert losses(parts) == losses(whole)
    assert same_weights(parts, whole)


def test_a_finished_run_is_not_run_again(
    make: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    first = make().train(panel=False)
    again = make().train()
    assert again.status == "finished"
    assert "already finished" in capsys.readouterr().out
    assert len(again.records.attempts()) == 1
    assert losses(again) == losses(first)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 5}, "seed"),
        ({"algorithm": GRPO(group_size=3)}, "algorithm.group_size"),
        ({"optimizer": Optimizer(learning_rate=1e-2)}, "optimizer.learning_rate"),
        ({"trainer": TrainerConfig(dtype="bf16")}, "dtypes"),
        ({"environment": SingleTurn(tasks(), length_reward, reward_range=(0, 2))}, "reward_range"),
        ({"environment": SingleTurn(tasks(7), length_reward)}, "tasks"),
    ],
)
def test_a_run_is_not_continued_as_another_run(
    make: Callable[..., Job], change: dict[str, Any], named: str
) -> None:
    make(steps=1).train(panel=False)
    with pytest.raises(ConfigError) as caught:
        make(**{"steps": 2, **change}).train(panel=False)
    assert f"started with {named} = " in str(caught.value)
    assert "--name NEW" in str(caught.value)


def raises(task: Task, reply: str) -> float:
    raise RuntimeError("the grader's database is away")


def hangs(task: Task, reply: str) -> float:
    time.sleep(3600)
    return 1.0


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (raises, "the grader's database is away"),
        (lambda task, reply: float("nan"), "nan"),
        (lambda task, reply: "1.0", "'1.0'"),
        (lambda task, reply: None, "None"),
        (lambda task, reply: 1.5, "1.5"),
        (hangs, "within 1 s"),
        (lambda task, reply: os._exit(3), "3"),
    ],
    ids=["raises", "nan", "string", "none", "out of range", "hangs", "dies"],
)
def test_a_reward_that_never_works_stops_the_run_with_its_cause(
    make: Callable[..., Job], reward: Any, says: str
) -> None:
    """OpenEnv PR#1199, NeMo-Gym#1351 (cases 16, 17): a broken grader is never a number."""
    job = make(reward, deadlines=Deadlines(reward_s=1.0), evaluation=Evaluation(before=False))
    with pytest.raises(RunStopped) as caught:
        job.train(panel=False)
    text = str(caught.value)
    assert "no episode of the first step got a reward" in text
    assert says in text
    run = Run(job.runs_dir / job.name, None)  # type: ignore[arg-type]  # only its records are read
    assert run.status == "failed"
    assert not run.records.series("train/loss")
    rollouts = run.records.rollouts(split="train")
    assert len(rollouts) == 8
    assert all(record["reward"] is None and record["abstain"]["reason"] for record in rollouts)


class SometimesBroken(Environment):
    """Every second prompt's set-up fails: its group abstains, the others train."""

    def tasks(self) -> list[Task]:
        return tasks()

    async def episode(self, task: Task, ep: Any) -> Reward | Abstain:
        reply = await ep.say()
        if int(task.chat[0].content.split()[-1]) % 2:
            raise ConnectionError("reset failed")
        return Reward(length_reward(task, reply))


def test_faults_in_some_episodes_leave_the_others_training(make: Callable[..., Job]) -> None:
    """NeMo-Gym PR#2552 (case 14): 91.6 % of rollouts were failed resets entered as reward 0."""
    run = make(environment=SometimesBroken(), steps=4).train(panel=False)
    records = list(run.records.rollouts(split="train"))
    broken = [r for r in records if r["abstain"]]
    assert broken
    assert len(broken) < len(records)
    assert all("reset failed" in r["abstain"]["reason"] for r in broken)
    assert all(r["reward"] is None for r in broken)
    assert all(r["advantage"] is None for r in broken)
    assert run.audit().ok


def test_a_constant_reward_becomes_a_visible_state(make: Callable[..., Job]) -> None:
    with pytest.raises(RunStopped) as caught:
        make(lambda task, reply: 1.0, steps=9).train(panel=False)
    assert "5 steps in a row taught nothing" in str(caught.value)


def test_a_missing_model_names_what_was_tried(make: Callable[..., Job], model: Path) -> None:
    with pytest.raises(ModelSourceError) as caught:
        make(model=str(model.parent / "tinny")).train(panel=False)
    assert "tiny" in str(caught.value), "the nearest folder"
    assert caught.value.exit_code == 3


def test_an_empty_task_list_is_refused(make: Callable[..., Job]) -> None:
    with pytest.raises(TaskError, match=r"no task|empty"):
        make(environment=SingleTurn([], length_reward)).train(panel=False)


def test_a_prompt_longer_than_the_context_is_refused_before_anything_runs(make: Callable[..., Job]) -> None:
    long = [*tasks(3), Task(prompt="x" * 400)]
    with pytest.raises(ConfigError) as caught:
        make(environment=SingleTurn(long, length_reward)).train(panel=False)
    assert "1 of 4 prompts do not fit" in str(caught.value)
    assert "engine.context_tokens" in str(caught.value)


def test_a_falling_learning_rate_fixes_the_number_of_steps(make: Callable[..., Job]) -> None:
    falling = {
        "optimizer": Optimizer(learning_rate=1e-3, schedule="linear"),
        "evaluation": Evaluation(before=False),
    }
    make(steps=1, **falling).train(panel=False)
    with pytest.raises(ConfigError, match="learning rate falls"):
        make(steps=2, **falling).train(panel=False)


def test_a_refused_start_fixes_nothing(make: Callable[..., Job], tmp_path: Path) -> None:
    """The error's own advice must work with the same command."""
    bare = make_tiny_model(tmp_path / "bare", chat_template=False)
    with pytest.raises(ChatError):
        make(model=str(bare), steps=1).train(panel=False)
    assert make(model=str(bare), steps=1, chat_template="none").train(panel=False).status == "finished"


def test_a_job_limit_that_the_environment_overrides_is_refused(make: Callable[..., Job]) -> None:
    own = SingleTurn(tasks(), length_reward, sandbox=SandboxSpec(time_s=1))
    with pytest.raises(ConfigError) as caught:
        train(resolve(make(environment=own), sets=["sandbox.memory_mb=64"], files=()), panel=False)
    assert "sandbox.memory_mb = 64 (from --set sandbox.memory_mb=64) has no effect" in str(caught.value)


def test_a_run_can_be_asked_to_stop_before_it_began(make: Callable[..., Job]) -> None:
    run = make(steps=50).train(wait=False, panel=False)
    run.stop()
    assert run.wait(90).status == "stopped"
    assert Run(run.path.parent / "never", run._resolved).status == "empty"


def test_a_changed_reward_is_said_when_the_run_continues(make: Callable[..., Job], tmp_path: Path) -> None:
    source = "def reward(task, reply):\n    return len(reply.encode()) % {n} / {n}\n"
    for steps, n in ((1, 3), (2, 5)):
        path = tmp_path / "reward_file.py"
        path.write_text(source.format(n=n))
        scope: dict[str, Any] = {}
        exec(compile(path.read_text(), str(path), "exec"), scope)
        run = make(scope["reward"], steps=steps, evaluation=Evaluation(before=False, after=False)).train(
            panel=False
        )
    notices = [e["fields"]["text"] for e in run.records.events("notice")]
    assert sum("earlier steps were scored by another one" in text for text in notices) == 1


def test_several_updates_from_one_steps_samples_are_clipped_by_ratio(make: Callable[..., Job]) -> None:
    eager = {"algorithm": GRPO(group_size=4, updates_per_step=4, clip_low=0.01, clip_high=0.01)}
    run = make(steps=2, optimizer=Optimizer(learning_rate=1e-2), **eager).train(panel=False)
    assert run.status == "finished"
    assert max(value for _, value in run.records.series("train/clip_fraction")) > 0


def test_a_template_that_drops_the_prompt_is_refused(make: Callable[..., Job]) -> None:
    """trl#5224, prime-rl#1334 (case 13): a template dropped text, and the run went on."""
    with pytest.raises(ChatError, match="renders 6 different prompts to the same 2 tokens"):
        make(chat_template="{{ 'hi' }}").train(panel=False)


def test_held_out_tasks_are_asked_for_once(make: Callable[..., Job]) -> None:
    once = SingleTurn(tasks(), length_reward, evaluation_tasks=iter(tasks(2, "held out")))
    run = make(environment=once, steps=1).train(panel=False)
    assert [e["when"] for e in run.records.evals()] == ["before", "after"]


def test_a_ledger_that_lost_entries_is_said_not_guessed(make: Callable[..., Job]) -> None:
    run = make(steps=2).train(panel=False)
    for file in (run.path / "ledger").rglob("*.jsonl"):
        file.unlink()
    with pytest.raises(RecordError, match="ends at step 0, before its checkpoint of step 2"):
        make(steps=3).train(panel=False)


def test_a_removed_checkpoint_is_said_and_its_steps_are_redone(make: Callable[..., Job]) -> None:
    whole = make(name="whole", steps=4).train(panel=False)
    run = make(name="cut", steps=3).train(panel=False)
    shutil.rmtree(run.checkpoints()[-1])
    run = make(name="cut", steps=4).train(panel=False)
    notices = [e["fields"]["text"] for e in run.records.events("notice")]
    assert "the checkpoint of step 3 is gone or damaged: going on from step 2" in notices
    assert losses(run) == losses(whole)
    assert run.audit().ok


def test_a_missing_chat_template_names_the_ways_out(make: Callable[..., Job], tmp_path: Path) -> None:
    bare = make_tiny_model(tmp_path / "bare", chat_template=False)
    with pytest.raises(ChatError) as caught:
        make(model=str(bare)).train(panel=False)
    assert "none" in str(caught.value)
    raw = make(model=str(bare), chat_template="none", name="raw", steps=1).train(panel=False)
    assert raw.status == "finished"


def test_a_disk_that_fills_up_stops_the_run_and_loses_nothing(
    make: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    from palestra.trainer.torch_trainer import TorchTrainer

    def full(self: TorchTrainer, folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    whole = make(name="whole", steps=4).train(panel=False)
    make(name="full", steps=2).train(panel=False)
    with monkeypatch.context() as patched:
        patched.setattr(TorchTrainer, "save_state", full)
        with pytest.raises(RecordError, match="No space left"):
            make(name="full", steps=4).train(panel=False)
    run = make(name="full", steps=4).train(panel=False)
    assert run.audit().ok
    assert losses(run) == losses(whole)


def test_two_runs_in_one_directory_are_refused(make: Callable[..., Job]) -> None:
    slow = SingleTurn(tasks(), lambda task, reply: time.sleep(0.2) or length_reward(task, reply))
    job = make(environment=slow, steps=50)
    first = job.train(wait=False, panel=False)
    deadline = time.monotonic() + 60
    while not (first.path / "run.json").exists() or not first.records.attempts():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(RecordError) as caught:
        job.train(panel=False)
    assert str(os.getpid()) in str(caught.value)
    first.stop()
    assert first.wait(90).status == "stopped"
    audit = first.audit()
    assert audit.attempts == len(first.records.attempts()) == 1, "the refused start began nothing"
    assert audit.ok == (audit.steps > 0), "asked to stop before its first step it proves nothing"


def test_the_resolved_settings_and_their_origins_are_kept(make: Callable[..., Job]) -> None:
    run = make(steps=1).train(panel=False)
    folder = run.path / "config" / "attempt_1"
    assert json.loads((folder / "resolved.json").read_text())["steps"] == 1
    assert (folder / "provenance.json").exists()
    assert (folder / "launch.json").exists()


def test_every_error_of_a_pillar_has_a_boundary() -> None:
    assert all(
        isinstance(error, type) and issubclass(error, PalestraError) for error in (TaskError, ChatError)
    )
    assert TaskError.boundary is not None
