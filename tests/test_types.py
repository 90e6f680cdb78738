"""The constructors refuse every object that would be wrong later."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.trajectories import TASK, trajectory
from palestra.types import (
    UNVERSIONED,
    Abstain,
    Boundary,
    Completion,
    Group,
    Manifest,
    Message,
    Reward,
    SamplingParams,
    Span,
    StopReason,
    Task,
    TensorEntry,
    Trajectory,
    Turn,
    Version,
)

tokens = st.integers(0, 50_000)
run_names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    ids = draw(st.lists(tokens, min_size=1, max_size=12))
    logprobs = [draw(st.floats(-50, 0)) for _ in ids]
    versions = [draw(st.integers(0, 9)) for _ in ids]
    return Completion(tuple(ids), tuple(logprobs), tuple(versions), draw(st.sampled_from(StopReason)))


@given(st.lists(completions(), min_size=1, max_size=4), st.lists(tokens, max_size=6))
def test_joined_turns_are_the_tokens_in_order_with_their_masks(
    sampled: list[Completion], given_ids: list[int]
) -> None:
    """slime#1440, PR#2207 (case 12): loss mask and response length differed after a partial rollout."""
    turns = [t for c in sampled for t in (Turn.given(given_ids), Turn.sampled(c))]
    built = Trajectory("t", TASK.hash, tuple(turns), Reward(1.0))
    assert built.token_ids == tuple(i for c in sampled for i in [*given_ids, *c.token_ids])
    assert built.sampled_count == sum(len(c.token_ids) for c in sampled)
    columns = (built.token_ids, built.sampled_mask, built.logprobs, built.versions)
    assert len({len(column) for column in columns}) == 1
    assert built.stop_reason is sampled[-1].stop_reason


@given(completions(), st.sampled_from(["logprobs", "versions", "sampled_mask"]), st.booleans())
def test_columns_of_different_length_cannot_be_built(
    completion: Completion, column: str, longer: bool
) -> None:
    """slime#1440 (case 12): checked where the object is made."""
    values = getattr(Turn.sampled(completion), column)
    wrong = (*values, values[0]) if longer else values[:-1]
    with pytest.raises(ValueError, match="must have one length"):
        dataclasses.replace(Turn.sampled(completion), **{column: wrong})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("token_ids", (-1,), "negative"),
        ("logprobs", (math.nan,), "not finite"),
        ("logprobs", (0.5,), "above 0"),
        ("versions", (UNVERSIONED,), "needs a policy version"),
        ("sampled_mask", (False,), "nobody sampled"),
        ("stop_reason", None, "stop_reason"),
        ("role", "user", "cannot hold sampled"),
        ("role", "robot", "role must be one of"),
    ],
)
def test_a_turn_with_a_wrong_token_cannot_be_built(field: str, value: Any, message: str) -> None:
    turn = Turn.sampled(Completion((7,), (-0.1,), (3,), StopReason.EOS))
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(turn, **{field: value})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_cannot_be_built(value: float) -> None:
    """OpenEnv PR#1199, Repo2RLEnv#144 (case 17): nan and 1.5 passed as rewards."""
    with pytest.raises(ValueError, match="finite"):
        Reward(value)
    with pytest.raises(ValueError, match="finite"):
        Reward(0.0, parts={"style": value})


@pytest.mark.parametrize("value", ["1.0", None, b"1", [1.0], {"reward": 1}])
def test_a_reward_that_is_no_number_cannot_be_built(value: Any) -> None:
    with pytest.raises(TypeError, match="must be a number"):
        Reward(value)


def test_rewards_are_floats_and_true_is_one() -> None:
    assert Reward(True).value == 1.0
    assert isinstance(Reward(1).value, float)
    with pytest.raises(TypeError):
        Reward(1.0, {"a": 1.0}).parts["a"] = 2.0  # type: ignore[index]


def test_an_abstention_needs_a_reason_and_a_known_boundary() -> None:
    with pytest.raises(ValueError, match="reason"):
        Abstain("  ")
    with pytest.raises(ValueError, match="nowhere"):
        Abstain("why", "nowhere")  # type: ignore[arg-type]
    assert Abstain("why", "engine").boundary is Boundary.ENGINE  # type: ignore[arg-type]


def test_a_rewarded_trajectory_without_a_sampled_token_cannot_be_built() -> None:
    with pytest.raises(ValueError, match="at least one sampled token"):
        Trajectory("t", TASK.hash, (Turn.given([1, 2]),), Reward(1.0))
    assert Trajectory("t", TASK.hash, (), Abstain("engine died")).sampled_count == 0


def test_members_of_a_group_share_one_task() -> None:
    """prime-rl PR#600, tinker-cookbook PR#771 (case 19)."""
    other = Task(prompt="another")
    with pytest.raises(ValueError, match="answered task"):
        Group("g", TASK.hash, (trajectory("a", 1.0), trajectory("b", 0.0, task=other)))


def test_a_group_is_never_empty_and_holds_nobody_twice() -> None:
    with pytest.raises(ValueError, match="no trajectory"):
        Group("g", TASK.hash, ())
    with pytest.raises(ValueError, match="twice"):
        Group("g", TASK.hash, (trajectory("a", 1.0), trajectory("a", 0.0)))


def test_a_ragged_group_keeps_its_rewards_beside_its_members() -> None:
    """slime#1414, #2230, AReaL#1419 (case 18)."""
    group = Group("g", TASK.hash, (trajectory("a", 1.0), trajectory("b", None), trajectory("c", 0.0)))
    assert [t.id for t in group.rewarded] == ["a", "c"]
    assert group.rewards == (1.0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, "either prompt or messages"),
        ({"prompt": "a", "messages": (Message("user", "b"),)}, "either prompt or messages"),
        ({"prompt": "  \n"}, "must not be empty"),
    ],
)
def test_a_task_needs_exactly_one_prompt(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Task(**arguments)


def test_a_prompt_that_is_no_text_is_refused_by_type() -> None:
    with pytest.raises(TypeError, match="prompt must be str, got int"):
        Task(prompt=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="content must be str"):
        Message("user", None)  # type: ignore[arg-type]


@given(st.text(min_size=1).filter(str.strip), st.dictionaries(st.text(), st.integers()))
def test_the_task_hash_covers_content_and_not_the_id(prompt: str, secret: dict[str, int]) -> None:
    one, two = Task(prompt=prompt, secret=secret), Task(prompt=prompt, secret=secret, id="named")
    assert one.hash == two.hash
    assert one.id == one.hash[:12]
    assert one.hash != Task(prompt=prompt, secret={**secret, "extra": 1}).hash
    assert one.hash != Task(prompt=prompt + "!", secret=secret).hash


@pytest.mark.parametrize("value", [{1, 2}, object(), b"bytes", float])
def test_a_task_that_could_not_be_hashed_the_same_again_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="plain JSON values"):
        Task(prompt="p", data={"x": value})
    with pytest.raises(TypeError, match="plain JSON values"):
        Task(prompt="p", secret={"x": [value]})


def test_a_task_keeps_its_hash_whatever_happens_to_its_values() -> None:
    values = [1, 2]
    task = Task(prompt="p", data={"x": values})
    before = task.hash
    values.append(3)
    assert task.hash == before == Task(prompt="p", data={"x": [1, 2]}).hash


def test_a_reason_of_megabytes_is_cut_in_the_middle() -> None:
    abstention = Abstain("start" + "x" * 10**6 + "end", detail="y" * 10**6)
    assert len(abstention.reason) < 1_100
    assert abstention.reason.startswith("start")
    assert abstention.reason.endswith("end")
    assert len(abstention.detail) < 20_100


def test_a_secret_is_not_shown_and_not_writable() -> None:
    task = Task(prompt="p", secret={"answer": "tell-nobody"})
    assert "tell-nobody" not in repr(task)
    with pytest.raises(TypeError):
        task.secret["answer"] = 1  # type: ignore[index]


@given(run_names, st.integers(0, 10**9))
def test_a_version_survives_writing_and_parsing(run: str, number: int) -> None:
    assert Version.parse(str(Version(run, number))) == Version(run, number)


@pytest.mark.parametrize(
    "text", ["", "run", "run@", "@3", "run@-1", "run@01", "run@1.5", "a/b@1", "run@3 ", "base"]
)
def test_a_version_that_cannot_be_parsed_raises(text: str) -> None:
    """verl#7495 (case 1): a pointer that fell back to the base weights looked like slow learning."""
    with pytest.raises(ValueError, match="not a version"):
        Version.parse(text)


def entry(name: str = "w", digest: str = "00") -> TensorEntry:
    return TensorEntry(name, "F32", (2, 3), 24, digest)


def test_a_manifest_survives_writing_and_reading() -> None:
    manifest = Manifest(Version("r", 3), "delta", Version("r", 2), (entry("a"), entry("b")))
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.nbytes == 48


@pytest.mark.parametrize("change", ["name", "dtype", "shape", "nbytes", "digest"])
def test_a_manifest_whose_digest_does_not_match_is_refused(change: str) -> None:
    value = Manifest(Version("r", 1), "full", None, (entry(),)).to_json()
    place = ["name", "dtype", "shape", "nbytes", "digest"].index(change)
    value["tensors"][0][place] = {"shape": [3, 2], "nbytes": 25}.get(change, "other")
    with pytest.raises(ValueError, match="does not match"):
        Manifest.from_json(value)


@pytest.mark.parametrize("missing", ["version", "kind", "base", "tensors", "digest"])
def test_a_manifest_with_a_missing_key_is_refused(missing: str) -> None:
    value = Manifest(Version("r", 1), "full", None, (entry(),)).to_json()
    del value[missing]
    with pytest.raises(ValueError, match="not a manifest"):
        Manifest.from_json(value)


def test_a_manifests_base_fits_its_kind_and_its_run() -> None:
    with pytest.raises(ValueError, match="full manifest cannot have base"):
        Manifest(Version("r", 1), "full", Version("r", 0), ())
    with pytest.raises(ValueError, match="delta manifest cannot have base None"):
        Manifest(Version("r", 1), "delta", None, ())
    with pytest.raises(ValueError, match="base of another run"):
        Manifest(Version("r", 1), "delta", Version("s", 0), ())
    with pytest.raises(ValueError, match="twice"):
        Manifest(Version("r", 1), "full", None, (entry(), entry()))


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../b", ""])
def test_a_tensor_name_cannot_leave_its_folder(name: str) -> None:
    with pytest.raises(ValueError, match=r"folder|needs a name"):
        entry(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop": ("",)}, "stop string"),
        ({"stop": "abc"}, "tuple of strings"),
    ],
)
def test_sampling_parameters_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**arguments)


def test_a_span_runs_forward() -> None:
    assert Span("generate", 1.0, 1.0).name == "generate"
    with pytest.raises(ValueError, match="ends before"):
        Span("generate", 2.0, 1.0)


@pytest.mark.parametrize("made", [TASK, Reward(1.0), Abstain("x"), Version("r", 1), trajectory("t", 1.0)])
def test_what_crosses_rooms_is_frozen(made: Any) -> None:
    name = dataclasses.fields(made)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, name, None)


def test_a_task_with_an_unknown_field_lists_the_known_ones_and_where_answers_go() -> None:
    with pytest.raises(TypeError) as caught:
        Task(prompt="2 + 1", answer=3)  # type: ignore[call-arg]
    said = str(caught.value)
    assert "a Task has no 'answer'; it takes prompt, messages, data, secret, id" in said
    assert "secret={'answer': ...}" in said


def test_a_task_is_copied_and_replaced_as_it_is() -> None:
    import copy
    import dataclasses

    task = Task(prompt="2 + 1", data={"level": 1}, id="sum")
    assert copy.copy(task) == task
    assert dataclasses.replace(task, id="other").hash == task.hash
