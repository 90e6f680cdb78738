"""A failure that user code caught is no number: only the same call again, succeeding, mends it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from helpers.fake_engine import Abort, Fail
from helpers.played import FakeHost, abstained, run
from helpers.templates import CHATML, make_tokenizer
from palestra.environments.chat import Chat
from palestra.environments.episode import Episode
from palestra.errors import ChatError, EngineError, RewardError, SandboxError
from palestra.types import Boundary, Message, Reward, Task

Ask = Callable[[Any], Any]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat(make_tokenizer(tmp_path_factory.mktemp("chat"), CHATML))


PROGRAMS: list[tuple[Ask, Ask]] = [
    (lambda box: box.exec(["a"]), lambda box: box.exec(["b"])),
    (lambda box: box.exec(["a"], stdin=b"1"), lambda box: box.exec(["a"], stdin=b"2")),
    (lambda box: box.exec(["a"], env={"N": "1"}), lambda box: box.exec(["a"], env={"N": "2"})),
    (lambda box: box.python("a"), lambda box: box.python("b")),
    (lambda box: box.python("a", stdin=b"1"), lambda box: box.python("a", stdin=b"2")),
    (lambda box: box.python("a"), lambda box: box.exec(["a"])),
    (lambda box: box.python("a"), lambda box: box.close()),
]


async def try_both(first: Ask, second: Ask, chat: Chat) -> Any:
    """The outcome of an episode whose first program cannot run and whose second one can."""

    async def play(task: Task, ep: Episode) -> float:
        await ep.say()
        ok = 0.0
        async with ep.sandbox() as box:
            for ask in (first, second):
                try:
                    await ask(box)
                    ok += 0.5
                except SandboxError:
                    pass
        return ok

    return await run(play, ["7"], chat, sandbox_host=FakeHost(breaks=1))


@pytest.mark.parametrize(("first", "second"), PROGRAMS)
async def test_a_program_that_did_not_run_is_not_mended_by_another_one(
    chat: Chat, first: Ask, second: Ask
) -> None:
    """Case 14 (NeMo-Gym PR#2552): half the cases lost to a broken sandbox scored 0.5."""
    outcome = abstained(await try_both(first, second, chat))
    assert outcome.reason.startswith("the sandbox broke (the episode caught it and returned 0.5")
    assert outcome.boundary is Boundary.SANDBOX


@pytest.mark.parametrize("ask", [first for first, _ in PROGRAMS])
async def test_the_same_program_again_mends_it(chat: Chat, ask: Ask) -> None:
    assert (await try_both(ask, ask, chat)).outcome == Reward(0.5)


async def test_the_same_program_in_another_sandbox_mends_it(chat: Chat) -> None:
    async def play(task: Task, ep: Episode) -> float:
        await ep.say()
        while True:
            async with ep.sandbox() as box:
                try:
                    return float((await box.python("print(1)")).exit_code == 1)
                except SandboxError:
                    continue

    assert (await run(play, ["7"], chat, sandbox_host=FakeHost(breaks=2))).outcome == Reward(1.0)


async def test_a_sandbox_that_did_not_open_is_not_mended_by_the_next_one(chat: Chat) -> None:
    """Case 14 (NeMo-Gym PR#2552): nothing tells a second try from the next case's sandbox."""

    async def play(task: Task, ep: Episode) -> float:
        await ep.say()
        ok = 0.0
        for case in ("a", "b"):
            try:
                async with ep.sandbox() as box:
                    await box.python(case)
                    ok += 0.5
            except SandboxError:
                pass
        return ok

    outcome = abstained(await run(play, ["7"], chat, sandbox_host=FakeHost(refuses=1)))
    assert outcome.reason.startswith("no isolation on this machine (the episode caught it")


class Judge:
    """A reward that fails on its first call only."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, *arguments: Any, **named: Any) -> float:
        self.calls += 1
        if self.calls == 1:
            raise ConnectionError("the judge is down")
        return 0.5

    async def method(self, *arguments: Any) -> float:
        return await self(*arguments)


async def grade_twice(first: Ask, second: Ask, chat: Chat) -> Any:
    async def play(task: Task, ep: Episode) -> Any:
        await ep.say()
        value: Any = 0.0
        for ask in (first, second):
            with contextlib.suppress(RewardError):
                value = await ask(ep)
        return value

    return await run(play, ["7"], chat)


BOXED = object()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("a",), ("b",)),
        (("a",), ("a", "a")),
        ((1,), (True,)),
        (({"case": 1},), ({"case": 2},)),
        (([1, [2]],), ([1, [3]],)),
        ((object(),), (object(),)),
    ],
)
async def test_a_reward_that_failed_is_not_mended_by_one_of_other_arguments(
    chat: Chat, first: tuple[Any, ...], second: tuple[Any, ...]
) -> None:
    """Case 16 (NeMo-Gym #1351): a judge that was down counted as a verdict."""
    judge = Judge()
    outcome = abstained(
        await grade_twice(lambda ep: ep.grade(judge, *first), lambda ep: ep.grade(judge, *second), chat)
    )
    assert "the judge is down" in outcome.reason
    assert outcome.boundary is Boundary.REWARD


async def test_a_reward_that_failed_is_not_mended_by_another_reward(chat: Chat) -> None:
    async def other(reply: str) -> float:
        return 1.0

    judge = Judge()
    abstained(await grade_twice(lambda ep: ep.grade(judge, "a"), lambda ep: ep.grade(other, "a"), chat))


async def test_an_argument_that_was_changed_in_place_is_another_argument(chat: Chat) -> None:
    judge, seen = Judge(), [1]

    async def grade(ep: Episode) -> Any:
        try:
            return await ep.grade(judge, seen)
        finally:
            seen.append(2)

    abstained(await grade_twice(grade, grade, chat))


@pytest.mark.parametrize(
    "ask",
    [
        lambda judge, ep: ep.grade(judge, "a", 1, None, [1, {"b": (2,)}], BOXED, ep.task),
        lambda judge, ep: ep.grade(judge.method, "a"),
    ],
)
async def test_the_same_reward_of_equal_arguments_again_mends_it(chat: Chat, ask: Any) -> None:
    judge = Judge()
    trajectory = await grade_twice(lambda ep: ask(judge, ep), lambda ep: ask(judge, ep), chat)
    assert trajectory.outcome == Reward(0.5)


async def test_a_turn_that_failed_is_not_mended_by_saying_something_else(chat: Chat) -> None:
    """Case 15 (NeMo-RL PR#3589): a generation that failed is not an answer."""

    async def play(task: Task, ep: Episode) -> float:
        replies: list[str] = []
        for case in ("a", "b"):
            with contextlib.suppress(EngineError):
                replies.append(await ep.say(case))
        return 0.5 * len(replies)

    outcome = abstained(await run(play, [Fail("connection reset"), "7"], chat))
    assert outcome.reason.startswith("connection reset (the episode caught it")


async def test_an_aborted_turn_is_not_mended_by_the_next_turn(chat: Chat) -> None:
    """Case 15 (NeMo-RL PR#3589, #3470): what an abort cut off was trained on as the whole answer."""

    async def play(task: Task, ep: Episode) -> float:
        try:
            await ep.say("a")
        except EngineError:
            await ep.say("a")
        return 1.0

    outcome = abstained(await run(play, [Abort("hal"), "7"], chat))
    assert "aborted" in outcome.reason
    assert outcome.boundary is Boundary.ENGINE


async def test_a_chat_that_was_refused_is_not_mended_by_another_one(chat: Chat) -> None:
    async def play(task: Task, ep: Episode) -> float:
        try:
            await ep.say([Message("assistant", "7")])  # nothing left to answer
        except ChatError:
            await ep.say("Well?")
        return 1.0

    assert abstained(await run(play, ["7"], chat)).boundary is Boundary.CHAT
