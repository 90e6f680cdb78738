"""An episode's turns are exactly what the engine saw, and its failures cannot be talked away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.fake_engine import HANG, Abort, Fail, FakeEngine, Say
from helpers.templates import APPENDING, STRIPS_REASONING, make_tokenizer
from palestra.environments.chat import Chat
from palestra.environments.episode import Episode, turn_seed
from palestra.errors import ChatError, EngineError, RewardError, TaskError
from palestra.types import Boundary, Message, SamplingParams, StopReason, Task

TASK = Task(prompt="Guess my number.", secret={"n": 7})


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Chat]:
    folder = tmp_path_factory.mktemp("chats")
    made = {
        name: Chat(
            make_tokenizer(folder / name, text, eos="<|eot_id|>" if name == "llama3" else "<|im_end|>")
        )
        for name, text in APPENDING.items()
    }
    return {**made, "raw": Chat(make_tokenizer(folder / "raw", None), "none")}


@pytest.fixture
def chat(chats: dict[str, Chat]) -> Chat:
    return chats["chatml"]


def play(
    script: Any, chat: Chat, *, task: Task = TASK, context: int = 4096, **more: Any
) -> tuple[Episode, FakeEngine]:
    engine = FakeEngine(script, chat.tokenizer, context_tokens=context)
    sampling = more.pop("sampling", SamplingParams(max_new_tokens=64, seed=5))
    return Episode(task, "g0.1", engine=engine, chat=chat, sampling=sampling, **more), engine


def failed_in(episode: Episode) -> list[Boundary | None]:
    return [error.boundary for error in episode.unresolved.values()]


def joined(episode: Episode) -> tuple[int, ...]:
    return tuple(token for turn in episode.turns for token in turn.token_ids)


async def test_the_first_say_without_text_is_the_tasks_own_chat(chat: Chat) -> None:
    task = Task(messages=(Message("system", "Be brief."), Message("user", "Hi")))
    episode, engine = play(["Hello."], chat, task=task)
    assert await episode.say() == "Hello."
    assert engine.requests[0].prompt_ids == chat.first(task.chat)
    assert episode.messages == (*task.chat, Message("assistant", "Hello."))
    assert [turn.role for turn in episode.turns] == ["user", "assistant"]


async def test_the_answer_has_no_end_of_turn_token_and_the_turn_has(chat: Chat) -> None:
    episode, _ = play(["7"], chat)
    assert await episode.say() == "7"
    answer = episode.turns[-1]
    assert answer.token_ids == (ord("7"), chat.tokenizer.eos_token_ids[0])
    assert answer.sampled_mask == (True, True)
    assert answer.stop_reason is StopReason.EOS


async def test_later_turns_append_to_what_the_engine_saw(chat: Chat) -> None:
    episode, engine = play(["3", "7"], chat)
    await episode.say(TASK.prompt)
    assert await episode.say("Higher.") == "7"
    assert engine.requests[1].prompt_ids[: len(engine.seen[0])] == engine.seen[0]
    assert engine.seen[1] == joined(episode)
    # A chat of ordinary texts is token for token the template's rendering of the whole.
    assert engine.requests[1].prompt_ids == chat.first(episode.messages[:-1])


async def test_messages_of_any_role_can_be_said(chat: Chat) -> None:
    episode, _ = play(["a", "b", "c"], chat)
    await episode.say("Hi", role="system")
    await episode.say("exit 0", role="tool")
    await episode.say([Message("tool", "out"), Message("user", "Well?")])
    assert [turn.role for turn in episode.turns] == [
        "system",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]


@pytest.mark.parametrize(
    ("sampling", "answer", "shown"),
    [
        (SamplingParams(max_new_tokens=3), "abcdef", "abc"),
        (SamplingParams(stop=("d",)), Say("abcd", StopReason.STOP), "abcd"),
        (SamplingParams(stop_token_ids=(ord("d"),)), Say("abcd", StopReason.STOP), "abc"),
    ],
)
async def test_a_cut_answer_is_closed_by_the_template_before_the_next_turn(
    chat: Chat, sampling: SamplingParams, answer: Any, shown: str
) -> None:
    """Case 12 (slime#1440, PR#2207): masks went wrong where an answer was cut."""
    episode, engine = play([answer, "ok"], chat, sampling=sampling)
    assert await episode.say() == shown
    await episode.say("Go on.")
    closing = episode.turns[2]
    assert chat.tokenizer.decode(closing.token_ids).startswith("<|im_end|>\n<|im_start|>user\nGo on.")
    assert not any(closing.sampled_mask)
    assert engine.seen[-1] == joined(episode)


REPLIES = st.lists(st.integers(0, 262), min_size=1, max_size=12)
TEXTS = st.text(max_size=12) | st.sampled_from(["<|im_end|>", "<|im_start|>assistant\n", " ", "palestra0x0q"])


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from([*APPENDING, "raw"]),
    turns=st.lists(st.tuples(TEXTS, REPLIES), min_size=1, max_size=5),
    limit=st.integers(1, 12),
    stop_ids=st.sets(st.integers(0, 262), max_size=3),
)
def test_joined_turns_equal_what_the_engine_saw_for_any_conversation(
    chats: dict[str, Chat],
    name: str,
    turns: list[tuple[str, list[int]]],
    limit: int,
    stop_ids: set[int],
) -> None:
    """Case 13 (trl#5224, SkyRL#123, prime-rl#1334, ART#726): decode then encode drifted."""
    sampling = SamplingParams(max_new_tokens=limit, stop_token_ids=tuple(stop_ids))
    # "raw" has nothing but the text: an empty first one would be no prompt at all.
    texts = [text or "x" for text, _ in turns]
    episode, engine = play([ids for _, ids in turns], chats[name], sampling=sampling)

    async def converse() -> None:
        for text in texts:
            before = joined(episode)
            await episode.say(text)
            assert engine.seen[-1] == joined(episode)
            assert engine.requests[-1].prompt_ids[: len(before)] == before

    asyncio.run(converse())
    sampled = [
        t for turn in episode.turns for t, flag in zip(turn.token_ids, turn.sampled_mask, strict=True) if flag
    ]
    assert sampled == [token for _, ids in turns for token in ids[:limit]]
    assert all(turn.role == "assistant" or not any(turn.sampled_mask) for turn in episode.turns)


async def test_a_template_that_rewrites_is_refused_at_the_follow_up_and_keeps_the_first_turn(
    tmp_path: Path,
) -> None:
    chat = Chat(make_tokenizer(tmp_path, STRIPS_REASONING))
    episode, _ = play(["<think>hm</think>7", "8"], chat)
    await episode.say()
    before = episode.turns
    with pytest.raises(ChatError, match="the model's chat template drops"):
        await episode.say("Again?")
    assert episode.turns == before
    assert failed_in(episode) == [Boundary.CHAT]


async def test_every_turn_has_a_seed_of_its_own_that_follows_from_the_episodes(chat: Chat) -> None:
    first, engine = play(["a", "b", "c"], chat)
    for text in ("x", "y", "z"):
        await first.say(text)
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds == [turn_seed(5, k) for k in range(3)]
    assert len({*seeds, *(turn_seed(6, k) for k in range(3))}) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert [request.id for request in engine.requests] == ["g0.1/0", "g0.1/1", "g0.1/2"]


async def test_a_first_prompt_that_does_not_fit_is_the_engines_error(chat: Chat) -> None:
    episode, _ = play(["a"], chat, context=8, context_tokens=8)
    with pytest.raises(EngineError, match="the context is 8"):
        await episode.say()
    assert episode.turns == ()


async def test_a_later_turn_that_does_not_fit_ends_the_talking_and_is_no_failure(chat: Chat) -> None:
    room = len(chat.first(TASK.chat)) + 8
    episode, engine = play(["a", "b"], chat, context=room, context_tokens=room)
    assert await episode.say() == "a"
    seen = joined(episode)
    assert await episode.say("a long hint") == ""
    assert await episode.say("another") == ""
    assert episode.stop_reason is StopReason.CONTEXT
    assert joined(episode) == seen
    assert len(engine.requests) == 1
    assert len(episode.turns) == 3
    assert episode.unresolved == {}


async def test_an_answer_that_filled_the_context_leaves_nothing_more_to_say(chat: Chat) -> None:
    episode, engine = play(["abcdefgh", "no"], chat, context=len(chat.first(TASK.chat)) + 4)
    assert await episode.say() == "abcd"
    assert episode.stop_reason is StopReason.CONTEXT
    assert await episode.say("more") == ""
    assert len(engine.requests) == 1


async def test_a_failed_turn_changes_nothing_and_can_be_tried_again(chat: Chat) -> None:
    episode, engine = play([Fail("out of memory"), "7"], chat)
    with pytest.raises(EngineError, match="out of memory"):
        await episode.say()
    assert episode.turns == ()
    assert episode.messages == ()
    assert failed_in(episode) == [Boundary.ENGINE]
    assert await episode.say() == "7"
    assert episode.unresolved == {}
    assert engine.seen[-1] == joined(episode)


async def test_a_plain_exception_of_an_engine_gets_its_boundary(chat: Chat) -> None:
    episode, _ = play([Fail(RuntimeError("CUDA error"))], chat)
    with pytest.raises(EngineError, match=r"turn 0 of g0\.1 raised RuntimeError: CUDA error") as caught:
        await episode.say()
    assert "Traceback" in caught.value.detail


async def test_an_aborted_generation_keeps_its_tokens_and_is_an_error(chat: Chat) -> None:
    """Case 15 (NeMo-RL PR#3589, #3470): generation errors were committed as empty text."""
    episode, engine = play([Abort("half an ans")], chat)
    with pytest.raises(EngineError, match="aborted"):
        await episode.say()
    assert episode.messages[-1] == Message("assistant", "half an ans")
    assert engine.seen[-1] == joined(episode)
    assert failed_in(episode) == [Boundary.ENGINE]


async def test_an_engine_that_samples_nothing_is_an_error_and_not_an_empty_answer(chat: Chat) -> None:
    """Case 15 (NeMo-RL PR#3589): empty text with reward 0."""
    episode, _ = play([[]], chat)
    with pytest.raises(EngineError, match="sampled nothing"):
        await episode.say()


async def test_a_say_that_the_environment_cancels_stays_unresolved(chat: Chat) -> None:
    """Case 15 (NeMo-RL #3470): an answer that never came is not an empty answer."""
    episode, engine = play([HANG], chat)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(episode.say(), 0.05)
    assert engine.cancelled == 1
    (error,) = episode.unresolved.values()
    assert "was cancelled" in error.what
    assert error.boundary is Boundary.ENGINE


async def test_two_says_at_once_are_refused(chat: Chat) -> None:
    episode, _ = play([HANG, "b"], chat)
    first = asyncio.ensure_future(episode.say())
    await asyncio.sleep(0.01)
    with pytest.raises(TaskError, match=r"two ep\.say at once"):
        await episode.say("x")
    first.cancel()


@pytest.mark.parametrize(
    ("said", "what"),
    [([], "no message at all"), (["Hi"], "a str: 'Hi'"), ([Message("user", "a"), None], "a NoneType")],
)
async def test_what_cannot_be_said_is_named(chat: Chat, said: Sequence[Any], what: str) -> None:
    episode, _ = play(["a"], chat)
    with pytest.raises(TaskError, match=what):
        await episode.say(said)


async def test_the_tasks_chat_is_said_once(chat: Chat) -> None:
    episode, _ = play(["a", "b"], chat)
    await episode.say()
    with pytest.raises(TaskError, match="already said"):
        await episode.say()


async def test_an_episode_that_is_over_says_nothing_more(chat: Chat) -> None:
    episode, _ = play(["a"], chat)
    assert await episode.close() == []
    for work in (episode.say("x"), episode.grade(lambda: 1.0)):
        with pytest.raises(TaskError, match=r"after episode g0\.1 had ended"):
            await work
    with pytest.raises(TaskError, match="after episode"):
        episode.sandbox()


async def test_spans_are_monotonic_seconds_in_their_order(chat: Chat) -> None:
    async def reward(reply: str) -> float:
        return 1.0

    episode, _ = play(["a", "b"], chat)
    started = time.monotonic()
    await episode.say("x")
    await episode.grade(reward, "a")
    await episode.say("y")
    assert [span.name for span in episode.spans] == ["generate", "reward", "generate"]
    assert started <= episode.spans[0].start_s <= episode.spans[-1].end_s <= time.monotonic()


async def test_an_async_reward_runs_here_under_its_deadline(chat: Chat) -> None:
    async def slow() -> float:
        await asyncio.sleep(3600)
        return 1.0

    async def broken() -> float:
        raise TimeoutError("the judge's own")

    episode, _ = play([], chat, reward_deadline_s=0.05)
    with pytest.raises(RewardError, match=r"slow did not return within 0\.05 s") as caught:
        await episode.grade(slow)
    assert "test_episode.py:" in caught.value.where
    with pytest.raises(RewardError, match="broken raised TimeoutError: the judge's own"):
        await episode.grade(broken)


async def test_a_plain_reward_without_workers_is_an_error(chat: Chat) -> None:
    episode, _ = play([], chat)
    with pytest.raises(RewardError, match="no workers"):
        await episode.grade(lambda: 1.0)
