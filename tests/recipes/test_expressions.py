"""The expression task: its evaluator against a naive one, its tasks, its reward, its warmed-up model."""

from __future__ import annotations

import ast
import inspect
import json
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.environments.base import validate_tasks
from palestra.environments.single_turn import SingleTurn
from palestra.environments.worker import RewardWorkers
from palestra.errors import MissingExtraError, TrainerError
from palestra.models.config import ModelConfig
from palestra.models.sources import resolve_model
from palestra.models.tensors import load_tensors
from palestra.models.tokenizer import Tokenizer
from palestra.recipes import expressions as recipe
from palestra.recipes.expressions import (
    ALPHABET,
    DIGITS,
    LARGEST_TARGET,
    OPERATORS,
    RECORD,
    Beginning,
    WarmUp,
    answers,
    evaluate,
    evaluation_tasks,
    prepare_model,
    reward,
    tasks,
)
from palestra.types import Task

EVERY_EXPRESSION = ["".join(c) for c in product(DIGITS, OPERATORS, DIGITS, OPERATORS, DIGITS)]
TINY = WarmUp(
    layers=1, hidden=16, intermediate=16, heads=2, pairs_per_step=16, learning_rate=1e-2,
    ramp_steps=2, enough=0.0, check_every=3, samples_per_task=1, max_steps=6, threads=1,
)  # fmt: skip


def naive(text: str) -> int:
    """Python's own idea of the value, by its syntax tree."""
    tree = ast.parse(text, mode="eval").body

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant):
            assert isinstance(node.value, int)
            return node.value
        assert isinstance(node, ast.BinOp)
        left, right = value(node.left), value(node.right)
        return {
            ast.Add: lambda: left + right,
            ast.Sub: lambda: left - right,
            ast.Mult: lambda: left * right,
        }[type(node.op)]()

    return value(tree)


VALUES = {text: naive(text) for text in EVERY_EXPRESSION}


def silent(line: str) -> None:
    return None


# -- the evaluator


def test_the_evaluator_agrees_with_python_on_every_expression_there_is() -> None:
    assert len(EVERY_EXPRESSION) == 9000
    assert [evaluate(text) for text in EVERY_EXPRESSION] == list(VALUES.values())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2+3*4", 14), ("2*3+4", 10), ("9-8-7", -6), ("9-8+7", 8), ("9-2*4", 1), ("2*3*4", 24),
        ("0-9*9", -81), ("9*9*9", 729), ("0*0-0", 0), ("8-0*9", 8),
    ],
)  # fmt: skip
def test_multiplication_comes_first_and_the_rest_from_the_left(text: str, value: int) -> None:
    assert evaluate(text) == value


HOSTILE = [
    "", " ", "\n", "7", "1+2", "1+2+", "1+2+3+4", "1+2+3 ", " 1+2+3", "1+2+3\n", "1 + 2", "1+ 2+", "+1+2+",
    "-1+2*", "1--23", "1+-23", "12+34", "12345", "+++++", "1+2=3", "1/2+3", "1**23", "1+2.5", "1_2+3",
    "(1+2)", "a+b*c", "1+2+x", "0x1+2", "1e2+3", "1+2+٣", "١+٢+٣", "1+2+３", "1＋2+3", "1+2+²", "1−2−3",
    "1×2×3", "1+2+①", "1+2\x00+", "1+2+3\x00", "1\u200b+2+", "<eos>", "1+2+3<eos>", "1+2" * 5000,
    "9" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:12]))
def test_a_text_that_is_not_exactly_an_expression_has_no_value(text: str) -> None:
    assert evaluate(text) is None


@given(text=st.one_of(st.text(max_size=8), st.text(alphabet=ALPHABET + " \n٣", min_size=4, max_size=6)))
def test_whatever_has_a_value_is_one_of_the_nine_thousand(text: str) -> None:
    value = evaluate(text)
    assert (value is not None) == (text in EVERY_EXPRESSION)
    assert value is None or value == VALUES[text]


def test_no_reply_is_ever_executed() -> None:
    tree = ast.parse(inspect.getsource(recipe))
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"eval", "exec", "compile", "__import__"}


# -- tasks


def test_every_beginning_can_be_completed_and_only_by_its_answers() -> None:
    for beginning, replies in answers().items():
        assert len(replies) >= recipe.FEWEST_ANSWERS
        right = {t[1:] for t in EVERY_EXPRESSION if t[0] == beginning.first and VALUES[t] == beginning.target}
        assert set(replies) == right
        assert len(replies) == len(right)


def test_no_beginning_with_enough_answers_is_left_out() -> None:
    counted: dict[tuple[int, str], int] = {}
    for text in EVERY_EXPRESSION:
        key = (VALUES[text], text[0])
        counted[key] = counted.get(key, 0) + 1
    expected = {
        key
        for key, count in counted.items()
        if 0 <= key[0] <= LARGEST_TARGET and count >= recipe.FEWEST_ANSWERS
    }
    assert {(b.target, b.first) for b in answers()} == expected


def test_training_and_held_out_tasks_share_nothing_and_together_are_everything() -> None:
    training, held_out = tasks(), evaluation_tasks()
    for field in ("id", "hash", "prompt"):
        ours, theirs = {getattr(t, field) for t in training}, {getattr(t, field) for t in held_out}
        assert not ours & theirs, field
        assert (len(ours), len(theirs)) == (len(training), len(held_out)), field
    assert len(training) + len(held_out) == len(answers())
    assert len(training) > 200
    assert len(held_out) > 50


def test_each_held_out_target_and_digit_occurs_in_training_with_others() -> None:
    """What is held out is the pair: neither number is new to the model."""
    training = [b for b in answers() if not b.held_out]
    for beginning in (b for b in answers() if b.held_out):
        assert any(b.target == beginning.target for b in training)
        assert any(b.first == beginning.first for b in training)


def test_held_out_beginnings_are_spread_over_all_digits_and_sizes() -> None:
    held_out = [b for b in answers() if b.held_out]
    assert {b.first for b in held_out} == set(DIGITS)
    assert {b.target // 5 for b in held_out} == {b.target // 5 for b in answers()}


def test_tasks_are_the_same_each_time_and_good_enough_for_a_job() -> None:
    assert [t.hash for t in tasks()] == [t.hash for t in tasks()]
    environment = SingleTurn(tasks, reward, evaluation_tasks=evaluation_tasks)
    assert validate_tasks(environment) == tuple(tasks())


def test_a_prompt_is_written_in_the_models_alphabet_and_tells_no_answer() -> None:
    for task in [*tasks(), *evaluation_tasks()]:
        prompt = task.prompt or ""
        assert set(prompt) <= set(ALPHABET)
        assert prompt == f"{task.secret['target']}={task.secret['first']}"


def test_the_order_of_tasks_does_not_depend_on_the_hash_seed() -> None:
    """A resumed run draws tasks by their index: another process must see the same list."""
    script = "from palestra.recipes.expressions import tasks; print([t.id for t in tasks()])"
    shown = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert shown == {f"{[t.id for t in tasks()]}\n".encode()}


# -- reward


def task_of(target: int, first: str) -> Task:
    return Task(prompt=Beginning(target, first).prompt, secret={"target": target, "first": first})


def test_every_answer_of_every_task_scores_1() -> None:
    replies = {f"{b.target}-from-{b.first}": texts for b, texts in answers().items()}
    for task in [*tasks(), *evaluation_tasks()]:
        assert all(reward(task, text) == 1.0 for text in replies[task.id])


def test_an_expression_with_another_value_scores_0() -> None:
    task = task_of(24, "3")
    right = {text[1:] for text in EVERY_EXPRESSION if text[0] == "3" and VALUES[text] == 24}
    for text in EVERY_EXPRESSION:
        if text[0] == "3":
            assert reward(task, text[1:]) == (1.0 if text[1:] in right else 0.0)


@pytest.mark.parametrize("reply", HOSTILE, ids=lambda text: ascii(text[:12]))
def test_a_hostile_reply_scores_0(reply: str) -> None:
    for target in (3, 6, 24):
        assert reward(task_of(target, "3"), reply) == 0.0


@pytest.mark.parametrize(
    "reply", ["*8+0", "*8+0 ", "*8+0\n", "*8+0<eos>", "*8+0+0", " *8+0", "3*8+0", "*８+0"]
)
def test_only_the_bare_completion_counts(reply: str) -> None:
    assert reward(task_of(24, "3"), reply) == (1.0 if reply == "*8+0" else 0.0)


@given(reply=st.text(max_size=12))
def test_a_reward_is_0_or_1_whatever_the_reply(reply: str) -> None:
    assert reward(task_of(7, "2"), reply) in (0.0, 1.0)


async def test_the_reward_runs_in_a_reward_worker() -> None:
    workers = RewardWorkers(1)
    try:
        assert await workers.call(reward, task_of(24, "3"), "*8+0", deadline_s=60) == 1.0
        assert await workers.call(reward, task_of(24, "3"), "*8+1", deadline_s=60) == 0.0
    finally:
        await workers.close()


def test_a_worker_that_judges_needs_neither_torch_nor_numpy() -> None:
    script = (
        "import sys\nfrom palestra.recipes.expressions import reward, tasks\nreward(tasks()[0], '+1')\n"
        "sys.exit(repr(found) if (found := {'torch', 'numpy', 'tokenizers'} & set(sys.modules)) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- the model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_model(tmp_path_factory.mktemp("cache"), silent, settings=TINY)


def test_the_model_is_complete_and_speaks_the_tasks_alphabet(made: Path) -> None:
    assert resolve_model(str(made)).folder == made.resolve()
    tokenizer = Tokenizer.from_folder(made)
    for task in [*tasks(), *evaluation_tasks()]:
        prompt = task.prompt or ""
        assert len(tokenizer.encode(prompt)) == len(prompt)
    longest = max(len(task.prompt or "") for task in tasks())
    assert longest + recipe.REPLY_TOKENS <= ModelConfig.from_folder(made).max_positions
    assert not (made / "start").exists()


def test_the_record_says_how_the_model_was_made(made: Path) -> None:
    record = json.loads((made / RECORD).read_text())
    assert record["settings"]["hidden"] == 16
    assert record["steps"] == TINY.check_every
    assert 0 <= record["sampled_reward"] <= 1


def test_a_second_call_is_answered_from_the_cache(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it was made again")

    monkeypatch.setattr(recipe, "_make", never)
    lines: list[str] = []
    assert prepare_model(made.parent.parent, lines.append, settings=TINY) == made
    assert lines == []


def test_the_cache_is_where_the_environment_says(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALESTRA_CACHE", str(made.parent.parent))
    assert prepare_model(progress=silent, settings=TINY) == made


def test_equal_settings_give_equal_bytes_and_another_seed_another_folder(made: Path, tmp_path: Path) -> None:
    again = prepare_model(tmp_path, silent, settings=TINY)
    assert again.name == made.name
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (again / name).read_bytes() == (made / name).read_bytes(), name
    other = prepare_model(tmp_path, silent, settings=replace(TINY, seed=1))
    assert other.name != again.name
    assert (other / "model.safetensors").read_bytes() != (again / "model.safetensors").read_bytes()


def test_training_changed_every_tensor_and_lowered_the_loss(tmp_path: Path) -> None:
    import torch

    from palestra.models.scratch import make_character_model
    from palestra.trainer.settings import TrainerSettings
    from palestra.trainer.torch_trainer import TorchTrainer

    settings = replace(TINY, check_every=12, max_steps=12)
    folder = prepare_model(tmp_path, silent, settings=settings)
    start = make_character_model(
        tmp_path / "start", alphabet=ALPHABET, layers=1, hidden=16, intermediate=16, heads=2, max_positions=32
    )
    before, after = load_tensors(start), load_tensors(folder)
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    batch = recipe._pairs(Tokenizer.from_folder(start), 64, random.Random(9))
    likelihood: list[float] = []
    for model in (start, folder):
        trainer = TorchTrainer(model, TrainerSettings(threads=1))
        logprobs = trainer.logprobs(batch)
        likelihood.append(sum(logprobs) / len(logprobs))
        trainer.close()
    assert likelihood[1] > likelihood[0] + 0.3


def test_a_warm_up_batch_holds_right_answers_with_every_reply_token_a_target(made: Path) -> None:
    tokenizer = Tokenizer.from_folder(made)
    batch = recipe._pairs(tokenizer, 20, random.Random(1))
    assert sum(batch.weights_N) == pytest.approx(1.0, abs=1e-5)
    assert batch.target_count == 20 * recipe.REPLY_TOKENS
    for sequence in range(20):
        inputs = [t for t, s in zip(batch.tokens_T, batch.segment_ids_T, strict=True) if s == sequence]
        rows = [n for n, s in enumerate(batch.sequence_ids_N) if s == sequence]
        targets = [batch.targets_N[n] for n in rows]
        given, reply = tokenizer.decode(inputs), tokenizer.decode(targets)
        target, _, expression = given.partition("=")
        assert reply.endswith("<eos>")
        assert evaluate(expression[:1] + reply.removesuffix("<eos>")) == int(target)
        assert given == f"{target}={expression[:1]}{reply[:4]}"
        start = batch.segment_ids_T.index(sequence)
        prompt = len(target) + 2
        assert [batch.predictors_N[n] - start for n in rows] == list(range(prompt - 1, prompt + 4))
        assert [
            p for p, s in zip(batch.positions_T, batch.segment_ids_T, strict=True) if s == sequence
        ] == list(range(len(inputs)))


def test_progress_says_how_far_it_is_and_where_the_model_lies(tmp_path: Path) -> None:
    lines: list[str] = []
    folder = prepare_model(tmp_path, lines.append, settings=TINY)
    assert any("step 3: " in line and "RL begins at 0%" in line for line in lines)
    assert lines[-1].endswith(str(folder))


def test_a_model_that_never_gets_there_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    hopeless = replace(TINY, enough=1.0)
    with pytest.raises(TrainerError, match="after 6 warm-up steps") as caught:
        prepare_model(tmp_path, silent, settings=hopeless)
    assert "max_steps" in caught.value.next_command
    assert [p.name for p in (tmp_path / "models").iterdir() if not p.name.endswith(".lock")] == []


def test_a_damaged_model_in_the_cache_is_made_again(tmp_path: Path) -> None:
    folder = prepare_model(tmp_path, silent, settings=TINY)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-7])
    assert prepare_model(tmp_path, silent, settings=TINY) == folder
    assert weights.read_bytes() == whole
    (folder / RECORD).write_text("{")
    prepare_model(tmp_path, silent, settings=TINY)
    assert json.loads((folder / RECORD).read_text())["schema"] == 1


KILLED = """
import os, signal, sys
from pathlib import Path
from palestra.recipes import expressions as recipe
from palestra.trainer.torch_trainer import TorchTrainer

save = TorchTrainer.save_model
def half(self, folder):
    save(self, folder)
    os.kill(os.getpid(), signal.SIGKILL)
TorchTrainer.save_model = half
settings = recipe.WarmUp(layers=1, hidden=16, intermediate=16, heads=2, pairs_per_step=16, learning_rate=1e-2,
                         ramp_steps=2, enough=0.0, check_every=3, samples_per_task=1, max_steps=6, threads=1)
recipe.prepare_model(Path(sys.argv[1]), lambda line: None, settings=settings)
"""


def test_a_kill_while_the_model_is_made_leaves_nothing_half_and_the_next_call_finishes(
    tmp_path: Path,
) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -9
    assert not list((tmp_path / "models").glob("expressions-*"))
    assert list((tmp_path / "models").glob(".expressions-*.building"))
    folder = prepare_model(tmp_path, silent, settings=TINY)
    assert resolve_model(str(folder)).digest
    assert not list((tmp_path / "models").glob(".expressions-*.building"))


def _prepare(cache: Path) -> tuple[str, bool]:
    lines: list[str] = []
    folder = prepare_model(cache, lines.append, settings=TINY)
    return str(folder), any("is ready" in line for line in lines)


def test_two_that_want_the_model_at_once_make_it_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:  # the lock is the kernel's, and does not know threads from processes
        (one, one_made), (two, two_made) = pool.map(_prepare, [tmp_path, tmp_path])
    assert one == two
    assert (one_made, two_made) in ((True, False), (False, True))
    assert resolve_model(one).digest


def _changes() -> list[tuple[str, Callable[[WarmUp], WarmUp]]]:
    values = {"layers": 2, "hidden": 32, "pairs_per_step": 8, "learning_rate": 2e-3, "enough": 0.5, "seed": 3}
    return [(name, lambda w, n=name, v=value: replace(w, **{n: v})) for name, value in values.items()]


@pytest.mark.parametrize(("name", "change"), _changes())
def test_every_setting_has_its_own_place_in_the_cache(name: str, change: Callable[[WarmUp], WarmUp]) -> None:
    assert change(TINY).key != TINY.key, name
    assert replace(TINY).key == TINY.key


def test_without_torch_the_error_names_the_extra_to_install(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['torch'] = None; sys.modules['safetensors'] = None\n"
        "from pathlib import Path\n"
        "from palestra.errors import MissingExtraError\n"
        "from palestra.recipes.expressions import prepare_model\n"
        "try: prepare_model(Path(sys.argv[1]))\n"
        "except MissingExtraError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "pip install 'palestra[torch]'" in done.stdout
    assert issubclass(MissingExtraError, Exception)
