"""Reward workers: whatever user code does, the answer is a value or an error, and nothing stays behind."""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import cloudpickle
import pytest
import pytest_asyncio

from palestra.environments.worker import RewardWorkers
from palestra.environments.worker_process import KEPT
from palestra.errors import RewardError
from palestra.types import Abstain, Reward, Task

# This module was not imported by a name that another process could import.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SLOW_S = 60.0
"""A deadline that is never meant to pass."""
TASK = Task(prompt="What is 1 + 1?", data={"level": 1}, secret={"answer": "2"})


@pytest_asyncio.fixture
async def workers() -> AsyncIterator[RewardWorkers]:
    pool = RewardWorkers(1)
    yield pool
    await pool.close()
    assert pool.pids == ()


def gone(pid: int) -> bool:
    """Whether the process ended (a zombie, which its own parent has yet to reap, did)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


async def refusal(
    workers: RewardWorkers, function: Any, *arguments: Any, deadline_s: float = SLOW_S
) -> RewardError:
    with pytest.raises(RewardError) as caught:
        await workers.call(function, *arguments, deadline_s=deadline_s)
    return caught.value


def right(task: Task, reply: str) -> float:
    return float(task.secret["answer"] in reply)


def pid_of_worker() -> int:
    return os.getpid()


def hang() -> None:
    time.sleep(3600)


def exits() -> None:
    os._exit(3)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def says_much_and_raises() -> None:
    print("to standard output")
    os.write(1, b"straight to descriptor 1\n")
    print("to standard error", file=sys.stderr)
    deeper()


def deeper() -> None:
    raise ValueError("the answer has no number")


async def test_a_reward_is_computed_in_another_process(workers: RewardWorkers) -> None:
    assert await workers.call(right, TASK, "It is 2.", deadline_s=SLOW_S) == 1.0
    assert await workers.call(right, TASK, "It is 3.", deadline_s=SLOW_S) == 0.0
    assert await workers.call(pid_of_worker, deadline_s=SLOW_S) != os.getpid()


async def test_verdict_objects_come_back_whole(workers: RewardWorkers) -> None:
    reward = Reward(0.5, {"style": 1.0})
    assert await workers.call(lambda: reward, deadline_s=SLOW_S) == reward
    assert await workers.call(lambda: Abstain("no idea"), deadline_s=SLOW_S) == Abstain("no idea")


async def test_a_function_is_sent_once_and_one_process_serves_many_calls(workers: RewardWorkers) -> None:
    pids = {await workers.call(pid_of_worker, deadline_s=SLOW_S) for _ in range(3)}
    assert len(pids) == 1

    class Counted:
        pickled = 0

        def __call__(self) -> int:
            return 1

        def __reduce__(self) -> Any:
            Counted.pickled += 1
            return (int, ())

    counted = Counted()
    for _ in range(2):
        await refusal(workers, counted)  # an int, on the other side: it cannot be called
    assert Counted.pickled == 1


def rewards_of_episodes() -> list[str]:
    """The functions below that are alive in this process."""
    gc.collect()
    found = [o for o in gc.get_objects() if isinstance(o, FunctionType) and o.__name__ == "of_episode"]
    return sorted(str(function()) for function in found)


async def test_functions_of_past_episodes_are_forgotten_here_and_in_the_worker(
    workers: RewardWorkers,
) -> None:
    """A reward that each episode makes anew would fill both processes in a long run."""

    def make(number: int) -> Callable[[], int]:
        def of_episode() -> int:
            return number

        return of_episode

    first, again = make(1000), make(1001)
    for number in range(3 * KEPT):
        assert await workers.call(make(number), deadline_s=SLOW_S) == number
        assert await workers.call(again, deadline_s=SLOW_S) == 1001  # in use: it stays
    assert await workers.call(first, deadline_s=SLOW_S) == 1000
    there = await workers.call(rewards_of_episodes, deadline_s=SLOW_S)
    assert isinstance(there, list)
    for alive in (there, rewards_of_episodes()):
        assert KEPT - 4 <= len(alive) <= KEPT + 2
        assert "1001" in alive


async def test_a_function_that_was_forgotten_is_sent_again(workers: RewardWorkers) -> None:
    def make(number: int) -> Callable[[], int]:
        return lambda: number

    functions = [make(number) for number in range(2 * KEPT)]
    for _ in range(2):
        for number, function in enumerate(functions):
            assert await workers.call(function, deadline_s=SLOW_S) == number


async def test_an_exception_comes_back_with_its_whole_remote_traceback(workers: RewardWorkers) -> None:
    """Case 9 (prime-rl PR#3020): a child failed and its traceback was never shown."""
    error = await refusal(workers, says_much_and_raises)
    assert error.what == "says_much_and_raises raised ValueError: the answer has no number"
    assert f"{__file__}:{deeper.__code__.co_firstlineno + 1} in deeper" in error.where
    assert "in says_much_and_raises" in error.detail
    assert "in deeper" in error.detail
    assert "worker_process.py" not in error.detail
    for line in ("to standard output", "straight to descriptor 1", "to standard error"):
        assert line in error.detail


async def test_printing_never_touches_the_protocol_and_belongs_to_its_own_call(
    workers: RewardWorkers,
) -> None:
    def chatty(size: int) -> int:
        print("x" * size)
        return size

    def quiet() -> None:
        raise RuntimeError("quiet")

    assert await workers.call(chatty, 300_000, deadline_s=SLOW_S) == 300_000
    assert "xxx" not in (await refusal(workers, quiet)).detail


async def test_a_reward_that_hangs_is_killed_named_and_replaced(workers: RewardWorkers) -> None:
    first = await workers.call(pid_of_worker, deadline_s=SLOW_S)
    error = await refusal(workers, hang, deadline_s=0.3)
    assert error.what == "hang did not return within 0.3 s"
    assert error.where.startswith(__file__)
    assert wait_until(lambda: gone(first))
    assert await workers.call(pid_of_worker, deadline_s=SLOW_S) != first


async def test_what_a_hanging_reward_printed_is_in_the_error(workers: RewardWorkers) -> None:
    def stuck() -> None:
        print("connecting to the judge")
        time.sleep(3600)

    await workers.call(pid_of_worker, deadline_s=SLOW_S)
    assert "connecting to the judge" in (await refusal(workers, stuck, deadline_s=1.0)).detail


async def test_processes_that_a_reward_started_die_with_it(workers: RewardWorkers, tmp_path: Path) -> None:
    def starts_one_and_hangs(note: str) -> None:
        child = subprocess.Popen(["sleep", "3600"])
        Path(note).write_text(f"{child.pid}!")
        child.wait()

    note = tmp_path / "pid"
    call = asyncio.ensure_future(workers.call(starts_one_and_hangs, str(note), deadline_s=SLOW_S))
    assert await asyncio.to_thread(wait_until, lambda: note.is_file() and note.read_text().endswith("!"))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    note.write_text(note.read_text().rstrip("!"))
    assert wait_until(lambda: gone(int(note.read_text())))


@pytest.mark.parametrize(
    ("function", "said"), [(exits, "it exited with code 3"), (is_killed, "it was killed by SIGSEGV")]
)
async def test_a_worker_that_dies_says_how_and_is_replaced(
    workers: RewardWorkers, function: Callable[[], None], said: str
) -> None:
    error = await refusal(workers, function)
    assert error.what == f"{function.__name__} ended its worker process: {said}"
    assert await workers.call(right, TASK, "2", deadline_s=SLOW_S) == 1.0


async def test_a_worker_that_died_while_idle_is_not_blamed_on_the_next_reward(workers: RewardWorkers) -> None:
    pid = await workers.call(pid_of_worker, deadline_s=SLOW_S)
    os.kill(pid, signal.SIGKILL)  # type: ignore[arg-type]
    assert wait_until(lambda: gone(pid))  # type: ignore[arg-type]
    await asyncio.sleep(0.2)  # the loop learns of it
    assert await workers.call(right, TASK, "2", deadline_s=SLOW_S) == 1.0


@pytest.mark.parametrize("leave", [lambda: sys.exit(0), lambda: exec("raise KeyboardInterrupt")])
async def test_sys_exit_in_a_reward_is_an_error_and_not_a_verdict(workers: RewardWorkers, leave: Any) -> None:
    """Case 31: ``sys.exit()`` in an honest answer scored 0."""
    pid = await workers.call(pid_of_worker, deadline_s=SLOW_S)
    assert (await refusal(workers, leave)).what.startswith("<lambda> raised ")
    assert await workers.call(pid_of_worker, deadline_s=SLOW_S) == pid


async def test_closing_its_own_streams_does_not_end_a_worker(workers: RewardWorkers) -> None:
    def closes() -> int:
        sys.stdout.close()
        sys.stderr.close()
        return 7

    assert await workers.call(closes, deadline_s=SLOW_S) == 7
    assert await workers.call(right, TASK, "2", deadline_s=SLOW_S) == 1.0


async def test_an_exception_whose_text_raises_is_reported_all_the_same(workers: RewardWorkers) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def raises() -> None:
        raise Unprintable

    assert "Unprintable" in (await refusal(workers, raises)).what


async def test_a_result_that_cannot_be_sent_back_is_an_error(workers: RewardWorkers) -> None:
    assert "cannot pickle" in (await refusal(workers, lambda: threading.Lock())).what

    async def answers() -> float:
        return 1.0

    assert "async def" in (await refusal(workers, lambda: answers())).what


def holding(value: Any) -> Callable[[], Any]:
    def uses() -> Any:
        return value

    return uses


class Judge:
    def __init__(self) -> None:
        self.connection = threading.Lock()

    def judge(self) -> float:
        return 1.0


LOCK: Any = threading.Lock()
A_LOCK = "cannot pickle '_thread.lock' object"


@pytest.mark.parametrize(
    ("function", "culprit"),
    [
        (holding(threading.Lock()), f"its variable 'value' (a lock): TypeError: {A_LOCK}"),
        (lambda: LOCK, f"its variable 'LOCK' (a lock): TypeError: {A_LOCK}"),
        (functools.partial(right, threading.Lock()), f"TypeError: {A_LOCK}"),
        (Judge().judge, f"TypeError: {A_LOCK}"),
    ],
)
async def test_what_cannot_be_pickled_is_said(workers: RewardWorkers, function: Any, culprit: str) -> None:
    error = await refusal(workers, function)
    assert f"cannot be sent to a reward worker: {culprit}" in error.what
    assert workers.pids == ()


async def test_an_argument_that_cannot_be_pickled_is_said(workers: RewardWorkers) -> None:
    error = await refusal(workers, right, LOCK, "2")
    assert error.what == f"the arguments of right cannot be sent to a reward worker: TypeError: {A_LOCK}"


async def test_modules_loaded_from_a_file_travel_by_value(workers: RewardWorkers, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("FACTOR = 3\ndef reward(task, reply):\n    return FACTOR * len(reply)\n")
    spec = importlib.util.spec_from_file_location("palestra_user_train", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        assert await workers.call(module.reward, None, "ab", deadline_s=SLOW_S) == 6
    finally:
        del sys.modules[spec.name]
        cloudpickle.unregister_pickle_by_value(module)


async def test_a_function_whose_module_the_worker_cannot_import_says_so(workers: RewardWorkers) -> None:
    module = type(sys)("only_here")
    exec("def reward():\n    return 1.0\n", module.__dict__)
    sys.modules["only_here"] = module
    try:
        error = await refusal(workers, module.reward)
    finally:
        del sys.modules["only_here"]
    assert (
        "reward cannot be loaded in a worker: ModuleNotFoundError: No module named 'only_here'" in error.what
    )


async def test_no_more_workers_run_than_asked_for_and_waiting_is_not_counted() -> None:
    pool = RewardWorkers(2)
    most = 0

    def naps() -> int:
        time.sleep(0.3)
        return os.getpid()

    async def one() -> object:
        nonlocal most
        value = await pool.call(naps, deadline_s=3.0)
        most = max(most, len(pool.pids))
        return value

    try:
        await asyncio.gather(*(pool.call(pid_of_worker, deadline_s=SLOW_S) for _ in range(2)))
        pids = await asyncio.gather(*(one() for _ in range(22)))  # 11 naps each outlast one deadline
        assert len(set(pids)) <= 2
        assert most <= 2
    finally:
        await pool.close()


async def test_a_cancelled_call_kills_its_worker_and_the_next_call_works(workers: RewardWorkers) -> None:
    pid = await workers.call(pid_of_worker, deadline_s=SLOW_S)
    call = asyncio.ensure_future(workers.call(hang, deadline_s=SLOW_S))
    await asyncio.sleep(0.1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert wait_until(lambda: gone(pid))  # type: ignore[arg-type]
    assert await workers.call(right, TASK, "2", deadline_s=SLOW_S) == 1.0


async def test_close_ends_running_calls_and_leaves_no_process() -> None:
    pool = RewardWorkers(1)
    pid = await pool.call(pid_of_worker, deadline_s=SLOW_S)
    running = asyncio.ensure_future(pool.call(hang, deadline_s=SLOW_S))
    waiting = asyncio.ensure_future(pool.call(hang, deadline_s=SLOW_S))
    await asyncio.sleep(0.1)
    await pool.close()
    await pool.close()
    assert gone(pid)  # type: ignore[arg-type]
    for call in (running, waiting):
        with pytest.raises(RewardError, match="hang gave no verdict: the reward workers were closed"):
            await call
    with pytest.raises(RewardError, match="closed"):
        await pool.call(right, TASK, "2", deadline_s=SLOW_S)


async def test_a_memory_limit_makes_a_greedy_reward_fail_alone() -> None:
    pool = RewardWorkers(1, memory_mb=400)
    try:
        assert "MemoryError" in (await refusal(pool, lambda: len(bytearray(1 << 30)))).what
        assert await pool.call(right, TASK, "2", deadline_s=SLOW_S) == 1.0
    finally:
        await pool.close()


def test_workers_die_with_their_parent_even_when_it_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    program = tmp_path / "parent.py"
    program.write_text(
        "import asyncio, os, sys, time\n"
        "from palestra.environments.worker import RewardWorkers\n"
        "def hang(note):\n"
        "    open(note, 'w').write(f'{os.getpid()}\\n')\n"
        "    time.sleep(3600)\n"
        "asyncio.run(RewardWorkers(1).call(hang, sys.argv[1], deadline_s=3600))\n"
    )
    parent = subprocess.Popen([sys.executable, str(program), str(note)])
    try:
        assert wait_until(lambda: note.is_file() and note.read_text().endswith("\n"))
        pid = int(note.read_text())
        assert not gone(pid)
    finally:
        parent.kill()
        parent.wait()
    assert wait_until(lambda: gone(pid))


def test_workers_serve_a_loop_that_is_not_the_main_threads() -> None:
    found: list[object] = []

    async def work() -> None:
        pool = RewardWorkers(1)
        try:
            found.append(await pool.call(right, TASK, "2", deadline_s=SLOW_S))
            found.append((await refusal(pool, exits)).what)
        finally:
            await pool.close()

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    thread.join()
    assert found == [1.0, "exits ended its worker process: it exited with code 3"]


def test_a_worker_starts_without_any_framework() -> None:
    program = (
        "import sys, palestra.environments.worker_process;"
        "print(sorted({'torch', 'numpy', 'asyncio', 'jinja2', 'pydantic'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_pool_needs_at_least_one_worker() -> None:
    with pytest.raises(ValueError, match="count must be >= 1"):
        RewardWorkers(0)
