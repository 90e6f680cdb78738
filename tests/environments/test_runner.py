"""Whatever happens inside an episode, a trajectory comes out, and no failure is a number."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_engine import HANG, Abort, Fail, FakeEngine
from helpers.played import ALWAYS, TASK, FakeHost, Played, abstained, run
from helpers.templates import CHATML, make_tokenizer
from palestra.environments.base import Environment
from palestra.environments.chat import Chat
from palestra.environments.episode import Episode
from palestra.environments.runner import run_episode
from palestra.environments.single_turn import SingleTurn
from palestra.errors import EngineError, SandboxError
from palestra.sandboxes.base import SandboxSpec
from palestra.types import Abstain, Boundary, Message, Reward, SamplingParams, StopReason, Task


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat(make_tokenizer(tmp_path_factory.mktemp("chat"), CHATML))


async def test_a_verdict_becomes_a_rewarded_trajectory(chat: Chat) -> None:
    async def play(task: Task, ep: Episode) -> float:
        return float(await ep.say() == "7")

    trajectory = await run(play, ["7"], chat)
    assert trajectory.outcome == Reward(1.0)
    assert (trajectory.id, trajectory.task_hash) == ("g3.0", TASK.hash)
    assert trajectory.sampled_count == 2
    assert trajectory.stop_reason is StopReason.EOS
    assert [span.name for span in trajectory.spans] == ["generate"]


async def test_an_abstention_of_the_environment_stays_as_it_is(chat: Chat) -> None:
    async def play(task: Task, ep: Episode) -> Abstain:
        await ep.say()
        return Abstain("the question is ambiguous")

    assert (await run(play, ["7"], chat)).outcome == Abstain("the question is ambiguous")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "None: no verdict"),
        ("1", "a str"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (1.5, "outside the declared range"),
        (Reward(-0.1), "outside the declared range"),
    ],
)
async def test_what_is_no_verdict_abstains_and_keeps_its_tokens(chat: Chat, value: Any, said: str) -> None:
    """Case 17 (OpenEnv PR#1025, #1199, Repo2RLEnv#144): a missing verdict scored 0; nan and 1.5 passed."""

    async def play(task: Task, ep: Episode) -> Any:
        await ep.say()
        return value

    trajectory = await run(play, ["7"], chat)
    outcome = abstained(trajectory)
    assert said in outcome.reason
    assert "Played.episode" in outcome.reason
    assert "played.py:" in outcome.reason
    assert "expected: a finite number from 0 to 1" in outcome.detail
    assert outcome.boundary is Boundary.REWARD
    assert trajectory.sampled_count == 2


async def test_an_exception_abstains_with_its_traceback_and_the_tokens_so_far(chat: Chat) -> None:
    """Case 14 (NeMo-Gym PR#2552): failed resets counted as 0 trained good behaviour away."""

    async def play(task: Task, ep: Episode) -> float:
        await ep.say()
        return {}["gone"]

    trajectory = await run(play, ["7"], chat)
    outcome = abstained(trajectory)
    assert "Played.episode raised KeyError: 'gone'" in outcome.reason
    assert outcome.boundary is Boundary.TASK
    assert 'return {}["gone"]' in outcome.detail
    assert trajectory.sampled_count == 2


@pytest.mark.parametrize(
    ("script", "said", "tokens"),
    [
        ([Fail("out of memory")], "out of memory", 0),
        (["3", Fail(RuntimeError("CUDA"))], "CUDA", 2),
        ([Abort("hal")], "aborted", 3),
        ([[]], "sampled nothing", 0),
    ],
)
async def test_a_failing_engine_abstains_at_its_boundary(
    chat: Chat, script: Any, said: str, tokens: int
) -> None:
    """Case 15 (NeMo-RL PR#3589): generation errors committed as empty text with reward 0."""

    async def play(task: Task, ep: Episode) -> float:
        for text in ("a", "b"):
            await ep.say(text)
        return 0.0

    trajectory = await run(play, script, chat)
    outcome = abstained(trajectory)
    assert said in outcome.reason
    assert outcome.boundary is Boundary.ENGINE
    assert "Traceback" in outcome.detail
    assert trajectory.sampled_count == tokens


async def test_a_failure_that_the_environment_swallows_is_still_no_number(chat: Chat) -> None:
    """Cases 14 and 16 (NeMo-Gym PR#2552, #1351): ``except Exception: return 0.0`` around infrastructure."""

    async def play(task: Task, ep: Episode) -> float:
        await ep.say("a")
        try:
            await ep.say("b")
        except Exception:
            return 0.0
        return 1.0

    outcome = abstained(await run(play, ["3", Fail("connection reset")], chat))
    assert outcome.reason == "connection reset (the episode caught it and returned 0, which is no verdict)"
    assert outcome.boundary is Boundary.ENGINE


async def test_a_failure_that_a_second_try_mends_counts_for_nothing(chat: Chat) -> None:
    async def play(task: Task, ep: Episode) -> float:
        try:
            await ep.say("a")
        except EngineError:
            await ep.say("a")
        return 1.0

    assert (await run(play, [Fail("connection reset"), "7"], chat)).outcome == Reward(1.0)


async def test_a_reward_without_a_sampled_token_abstains(chat: Chat) -> None:
    async def play(task: Task, ep: Episode) -> float:
        return 1.0

    outcome = abstained(await run(play, [], chat))
    assert "without having sampled anything" in outcome.reason
    assert outcome.boundary is Boundary.TASK


@pytest.mark.parametrize("leave", [lambda: sys.exit(0), lambda: exec("raise KeyboardInterrupt")])
async def test_sys_exit_in_an_episode_abstains_and_does_not_end_the_run(chat: Chat, leave: Any) -> None:
    async def play(task: Task, ep: Episode) -> float:
        await ep.say()
        leave()
        return 1.0

    outcome = abstained(await run(play, ["7"], chat))
    assert "Played.episode raised" in outcome.reason
    assert outcome.boundary is Boundary.TASK


async def test_an_episode_that_cancels_itself_abstains(chat: Chat) -> None:
    async def play(task: Task, ep: Episode) -> float:
        raise asyncio.CancelledError

    assert abstained(await run(play, [], chat)).reason == "the episode cancelled itself"


async def test_an_episode_that_is_not_async_abstains(chat: Chat) -> None:
    class Plain(Environment):
        def episode(self, task: Task, ep: Episode) -> Any:  # type: ignore[override]
            return 1.0

    outcome = abstained(await run(None, [], chat, environment=Plain()))  # type: ignore[arg-type]
    assert "Plain.episode is not a coroutine function" in outcome.reason


async def test_an_episode_beyond_its_deadline_abstains_in_the_room_it_waited_for(chat: Chat) -> None:
    """Case 20 (SkyRL#1173): a wait without a deadline stood still for 29 hours."""

    async def play(task: Task, ep: Episode) -> float:
        await ep.say("a")
        await ep.say("b")
        return 1.0

    engine = FakeEngine(["3", HANG], chat.tokenizer)
    trajectory = await run(play, None, chat, engine=engine, deadline_s=0.2)
    outcome = abstained(trajectory)
    assert outcome.reason == "the episode did not end within 0.2 s"
    assert outcome.boundary is Boundary.ENGINE
    for line in ('await ep.say("b")', "await self._engine.generate(", "await asyncio.Event().wait()"):
        assert line in outcome.detail
    assert trajectory.sampled_count == 2
    assert engine.cancelled == 1
    assert engine.running == 0


async def test_the_environments_own_waiting_is_its_own_failure(chat: Chat) -> None:
    async def play(task: Task, ep: Episode) -> float:
        await ep.say()
        await asyncio.sleep(3600)
        return 1.0

    assert abstained(await run(play, ["7"], chat, deadline_s=0.1)).boundary is Boundary.TASK


async def test_an_episode_that_ignores_being_cancelled_is_left_behind(chat: Chat) -> None:
    """Case 20 (SkyRL#1173): nothing an environment does can hold the step."""
    release = asyncio.Event()

    async def play(task: Task, ep: Episode) -> float:
        await ep.say()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        raise RuntimeError("too late to matter")

    trajectory = await run(play, ["7"], chat, deadline_s=0.1, cleanup_s=0.1)
    assert "left behind" in abstained(trajectory).detail
    assert trajectory.sampled_count == 2
    release.set()
    await asyncio.sleep(0.01)


async def test_cancellation_from_outside_passes_through_and_frees_the_engine(chat: Chat) -> None:
    ended: list[str] = []

    async def play(task: Task, ep: Episode) -> float:
        try:
            await ep.say()
        finally:
            ended.append("cleaned up")
        return 1.0

    engine = FakeEngine([HANG], chat.tokenizer)
    running = asyncio.ensure_future(run(play, None, chat, engine=engine))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended == ["cleaned up"]
    assert engine.running == 0


async def test_a_first_prompt_longer_than_the_context_abstains(chat: Chat) -> None:
    async def play(task: Task, ep: Episode) -> float:
        await ep.say()
        return 0.0

    outcome = abstained(await run(play, ["7"], chat, context=8, context_tokens=8))
    assert outcome.boundary is Boundary.ENGINE
    assert "the context is 8" in outcome.reason


async def test_a_context_that_fills_up_later_is_the_policys_doing_and_keeps_its_verdict(chat: Chat) -> None:
    async def play(task: Task, ep: Episode) -> float:
        replies = [await ep.say(f"hint {n}") for n in range(4)]
        return 0.25 * sum(map(bool, replies))

    room = len(chat.first((Message("user", "hint 0"),))) + 45  # two turns, and not three
    trajectory = await run(play, lambda prompt: "no", chat, context=room, context_tokens=room)
    assert trajectory.outcome == Reward(0.5)
    assert trajectory.stop_reason is StopReason.CONTEXT
    assert len(trajectory.token_ids) <= room


async def test_without_a_known_limit_a_later_overflow_abstains(chat: Chat) -> None:
    async def play(task: Task, ep: Episode) -> float:
        for n in range(9):
            await ep.say(f"hint {n}")
        return 0.0

    outcome = abstained(await run(play, lambda prompt: "no", chat, context=120))
    assert outcome.boundary is Boundary.ENGINE


async def test_a_program_that_fails_in_a_sandbox_is_data(chat: Chat) -> None:
    host = FakeHost()

    async def play(task: Task, ep: Episode) -> float:
        await ep.say()
        async with ep.sandbox() as box:
            return float((await box.python("raise")).ok)

    trajectory = await run(play, ["7"], chat, sandbox_host=host)
    assert trajectory.outcome == Reward(0.0)
    assert [span.name for span in trajectory.spans] == ["generate", "sandbox"]
    assert host.open_now == 0


@pytest.mark.parametrize(
    ("host", "said"),
    [
        (FakeHost(breaks=ALWAYS), "the sandbox broke"),
        (FakeHost(refuses=ALWAYS), "no isolation on this machine"),
        (None, "this run has no sandboxes"),
    ],
)
@pytest.mark.parametrize("swallow", [False, True])
async def test_a_broken_sandbox_abstains_even_if_the_environment_swallows_it(
    chat: Chat, host: FakeHost | None, said: str, swallow: bool
) -> None:
    """Case 14 (NeMo-Gym PR#2552): an infrastructure failure is never a number."""

    async def play(task: Task, ep: Episode) -> float:
        await ep.say()
        try:
            async with ep.sandbox() as box:
                return float((await box.exec(["true"])).ok)
        except SandboxError:
            if not swallow:
                raise
            return 0.0

    outcome = abstained(await run(play, ["7"], chat, sandbox_host=host))
    assert said in outcome.reason
    assert outcome.boundary is Boundary.SANDBOX


async def test_a_sandboxs_limits_come_from_the_call_then_the_environment_then_the_job(chat: Chat) -> None:
    host = FakeHost()
    job, own, call = SandboxSpec(memory_mb=1), SandboxSpec(memory_mb=2), SandboxSpec(memory_mb=3)

    async def play(task: Task, ep: Episode) -> float:
        await ep.say()
        async with ep.sandbox(), ep.sandbox(call):
            return 1.0

    await run(play, ["7"], chat, sandbox_host=host, sandbox_spec=job)
    await run(play, ["7"], chat, sandbox_host=host, sandbox_spec=job, environment=Played(play, sandbox=own))
    await run(play, ["7"], chat, sandbox_host=host)
    assert host.specs == [job, call, own, call, SandboxSpec(), call]


async def test_a_failure_while_closing_a_sandbox_never_takes_the_verdict(
    chat: Chat, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 32 (tinker-cookbook #501): cleaning up crashed the whole step."""

    async def play(task: Task, ep: Episode) -> float:
        await ep.say()
        async with ep.sandbox():
            return 1.0

    trajectory = await run(play, ["7"], chat, sandbox_host=FakeHost(close_error=OSError("device busy")))
    assert trajectory.outcome == Reward(1.0)
    assert trajectory.spans[-1].name == "cleanup_failed"
    assert "device busy" in caplog.text


async def test_a_failure_while_closing_a_sandbox_is_in_the_detail_beside_its_cause(chat: Chat) -> None:
    """Case 32 (tinker-cookbook #501): the cause stays the cause."""

    async def play(task: Task, ep: Episode) -> float:
        await ep.say()
        async with ep.sandbox():
            raise ValueError("the real cause")

    outcome = abstained(
        await run(play, ["7"], chat, sandbox_host=FakeHost(close_error=OSError("device busy")))
    )
    assert "the real cause" in outcome.reason
    assert "closing a sandbox failed" in outcome.detail
    assert "device busy" in outcome.detail


async def test_a_sandbox_that_the_environment_left_open_is_closed(chat: Chat) -> None:
    host = FakeHost()

    async def play(task: Task, ep: Episode) -> float:
        await ep.say()
        await ep.sandbox().__aenter__()
        return 1.0

    assert (await run(play, ["7"], chat, sandbox_host=host)).outcome == Reward(1.0)
    assert host.open_now == 0


async def test_a_deadline_inside_a_sandbox_closes_it(chat: Chat) -> None:
    host = FakeHost()

    async def play(task: Task, ep: Episode) -> float:
        await ep.say()
        async with ep.sandbox():
            await asyncio.sleep(3600)
        return 1.0

    abstained(await run(play, ["7"], chat, sandbox_host=host, deadline_s=0.1))
    assert host.open_now == 0


async def test_many_episodes_at_once_do_not_mix(chat: Chat) -> None:
    async def play(task: Task, ep: Episode) -> float:
        first = await ep.say(f"I am {ep.id}")
        second = await ep.say("and?")
        return float(first == second == "ok")

    engine = FakeEngine(lambda prompt: "ok", chat.tokenizer, delay_s=0.001)
    runs = [
        run_episode(
            Played(play), TASK, id=f"g0.{n}", engine=engine, chat=chat, sampling=SamplingParams(seed=n),
            deadline_s=60, reward_deadline_s=60,
        )
        for n in range(32)
    ]  # fmt: skip
    trajectories = await asyncio.gather(*runs)
    assert all(t.outcome == Reward(1.0) for t in trajectories)
    assert {t.token_ids for t in trajectories} <= set(engine.seen)
    assert len({t.token_ids for t in trajectories}) == 32
    assert engine.most_running > 1


def test_the_runner_has_no_broad_except() -> None:
    for name in ("runner", "episode", "single_turn"):
        module = __import__(f"palestra.environments.{name}", fromlist=["x"])
        source = Path(module.__file__).read_text()
        assert "except Exception" not in source
        assert "except:" not in source


async def test_an_episode_of_several_turns_is_one_session_and_a_single_turn_is_none(chat: Chat) -> None:
    async def play(task: Task, ep: Episode) -> float:
        await ep.say()
        await ep.say("again")
        return 1.0

    engine = FakeEngine(["1", "2", "3"], chat.tokenizer)
    for environment in (Played(play), SingleTurn([TASK], reward=lambda task, reply: 1.0)):
        await run_episode(
            environment,
            TASK,
            id="g3.0",
            engine=engine,
            chat=chat,
            sampling=SamplingParams(),
            deadline_s=30,
            reward_deadline_s=5,
        )
    assert [request.session for request in engine.requests] == ["g3.0", "g3.0", ""]
