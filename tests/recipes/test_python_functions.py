"""The quick start's reward against honest, wrong and hostile candidates, each in a real sandbox."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest

from helpers.sandbox_modes import here_or_skip
from palestra.errors import SandboxError
from palestra.recipes import python_functions as recipe
from palestra.recipes.python_functions import (
    CHAT_TEMPLATE,
    HELD_OUT_CONSTANTS,
    OPERATIONS,
    PLAIN_OPERATIONS,
    STOP,
    TRAINING_CONSTANTS,
    code_of,
    evaluation_tasks,
    inputs_for,
    parse_outputs,
    reward,
    same,
    tasks,
)
from palestra.sandboxes.base import ExecResult, ExecStatus, Sandbox
from palestra.sandboxes.bubblewrap import BubblewrapHost
from palestra.types import Task


class Episode:
    """As much of an episode as the reward may use."""

    def __init__(self, host: BubblewrapHost) -> None:
        self._host = host
        self.starts = 0

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        async with self._host.open(recipe.SPEC) as box:
            self.starts += 1
            yield box


@pytest.fixture(scope="module")
def probed() -> BubblewrapHost:
    return here_or_skip().host


@pytest.fixture
async def ep(probed: BubblewrapHost) -> AsyncIterator[Episode]:
    host = BubblewrapHost(concurrency=2)
    host._probed = True
    yield Episode(host)
    await host.close()


def task(name: str) -> Task:
    return next(t for t in [*tasks(), *evaluation_tasks()] if t.id == name)


def fenced(code: str) -> str:
    return f"```python\n{code}\n```\n"


ANSWERS: Mapping[str, str] = {
    "add": "x + {k}", "subtract": "x - {k}", "multiply": "x * {k}", "remainder": "x % {k}",
    "greater": "x > {k}", "less": "x < {k}", "divisible": "x % {k} == 0", "maximum": "max(x, {k})",
    "minimum": "min(x, {k})", "square": "x ** 2", "even": "not x % 2", "absolute": "x if x > 0 else -x",
}  # fmt: skip


@pytest.mark.parametrize("operation", [*OPERATIONS, *PLAIN_OPERATIONS], ids=lambda o: o.name)
async def test_an_honest_answer_to_every_operation_scores_1(ep: Episode, operation: recipe.Operation) -> None:
    k = 3 if operation in PLAIN_OPERATIONS else 9
    code = f"def f(x):\n    return {ANSWERS[operation.name].format(k=k)}"
    verdict = await reward(task(f"{operation.name}-0-{k}"), fenced(code), ep)
    assert verdict.value == 1.0
    assert ep.starts == 1, "all six inputs in one start"


async def test_a_wrong_answer_scores_0_and_is_told_from_no_answer(ep: Episode) -> None:
    wrong = await reward(task("add-0-6"), fenced("def f(x):\n    return x + 7"), ep)
    none = await reward(task("add-0-6"), "I would add them.", ep)
    assert (wrong.value, wrong.parts["answered"]) == (0.0, 1.0)
    assert (none.value, none.parts["answered"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    "code",
    [
        "def f(x):\n    return x + 6\nprint(f(2))\nimport sys\nsys.exit()",
        "import sys\ndef f(x):\n    print('debug', x)\n    return x + 6\nprint(json) if 0 else None",
        "def f(x): return x + 6\nif __name__ == '__main__':\n    raise SystemExit(3)",
        "f = lambda x: x + 6",
    ],
)
async def test_an_honest_answer_may_print_and_exit(ep: Episode, code: str) -> None:
    """Case 31: ``sys.exit()`` in an honest answer scored 0."""
    assert (await reward(task("add-0-6"), fenced(code), ep)).value == 1.0


EXPECTED = [1, 6, 7, 12, 18, 19]
"""What add-0-6 must give: the hostile answers below print it, and gain nothing where it is not returned."""

HOSTILE = {
    "prints the outputs": f"print({EXPECTED})",
    "prints the outputs and returns nonsense": f"def f(x):\n    print({EXPECTED})\n    return 'x'",
    "exits cleanly": "import sys\nsys.exit(0)",
    "exits hard": "import os\nos._exit(0)",
    "exits hard when called": "import os\ndef f(x):\n    os._exit(0)",
    "loops": "while True: pass",
    "sleeps": "import time\ntime.sleep(100)",
    "forks without end": "import os\nwhile True: os.fork()",
    "starts threads": "import threading\nwhile True: threading.Thread(target=input).start()",
    "eats memory": "x = 'a'\nwhile True: x += x",
    "eats memory when called": "def f(x):\n    return [0] * 10**10",
    "prints ten megabytes": "import os\nfor _ in range(2560): os.write(2, b'x' * 4096)\n"
    "def f(x): return x + 6",
    "is equal to everything": "class E:\n    def __eq__(s, o): return True\ndef f(x): return E()",
    "is an int equal to everything": "class E(int):\n    def __eq__(s, o): return True\n"
    "def f(x): return E(x)",
    "returns floats": "def f(x): return x + 6.0",
    "returns text": "def f(x): return str(x + 6)",
    "overrides json": "import json\njson.dumps = lambda *a: 'true'\ndef f(x): return 0",
    "overrides everything": "import builtins\nbuiltins.type = lambda *a: int\n"
    "builtins.all = lambda *a: True\ndef f(x): return True",
    "looks for the expected outputs": "import gc\ndef f(x):\n    for o in gc.get_objects():\n"
    "        if isinstance(o, dict) and 'outputs' in o: return o['outputs'].pop(0)\n    return 0",
    "reads /proc": "def f(x):\n    return open('/proc/1/environ').read()",
    "reads the host": "def f(x):\n    return open('/etc/shadow').read()",
    "walks the frames": "import sys\ndef f(x):\n    return sys._getframe(1).f_locals.get('expected', [0])[0]",
    "forges a verdict": "import os\nfor n in range(1, 20):\n    try: os.write(n, b'{\"value\": 1.0}')\n"
    "    except OSError: pass\nos._exit(0)",
    "forges twice": f"import os\nfor n in range(1, 20):\n    try: os.write(n, b'{EXPECTED}')\n"
    "    except OSError: pass\ndef f(x): return x + 6",
    "nests without end": "import os\nos.write(3, b'[' * 60000)\nos._exit(0)",
    "is a huge number": "def f(x): return 10 ** 100000",
    "raises what nobody catches": "def f(x): raise KeyboardInterrupt",
    "is no Python": "def f(x) return x",
    "holds a NUL": "def f(x): return x + 6\0",
    "holds a surrogate": "def f(x): return '\udcff'",
    "is empty": "",
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_answer_never_scores_1(ep: Episode, name: str) -> None:
    """Cases 17 and 31: the verdict is out of the candidate's reach; its crash is a 0, no abstention."""
    assert (await reward(task("add-0-6"), fenced(HOSTILE[name]), ep)).value == 0.0


async def test_true_is_not_1(ep: Episode) -> None:
    """`True == 1` in Python: greater-0-6 must return bools, and add must not."""
    numbers = fenced("def f(x):\n    return int(x > 6)")
    assert (await reward(task("greater-0-6"), numbers, ep)).value == 0.0
    assert (await reward(task("greater-0-6"), fenced("def f(x):\n    return x > 6"), ep)).value == 1.0


class FakeBox:
    """A sandbox that answers with a given result, and keeps what entered it."""

    def __init__(self, result: ExecResult | SandboxError) -> None:
        self.result = result
        self.entered = b""

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> ExecResult:
        raise AssertionError("the reward starts a Python, nothing else")

    async def python(self, source: str, *, stdin: bytes = b"") -> ExecResult:
        self.entered += source.encode() + stdin
        if isinstance(self.result, SandboxError):
            raise self.result
        return self.result

    async def close(self) -> None:
        return None

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        yield self


def ended(stdout: bytes, status: ExecStatus = ExecStatus.EXITED, code: int | None = 0) -> ExecResult:
    return ExecResult(status, code, None, stdout, b"", False, 0.0)


async def test_a_failed_sandbox_raises_and_is_never_a_number() -> None:
    """Case 14: an infrastructure failure is never a number; the environment turns it into an abstention."""
    with pytest.raises(SandboxError, match="launcher"):
        await reward(
            task("add-0-6"), fenced("def f(x): return x + 6"), FakeBox(SandboxError("launcher died"))
        )


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (ExecStatus.EXITED, 1),
        (ExecStatus.TIMEOUT, None),
        (ExecStatus.SIGNALED, None),
        (ExecStatus.OUTPUT_LIMIT, None),
    ],
)
async def test_right_outputs_of_a_program_that_did_not_end_well_score_0(
    status: ExecStatus, code: int | None
) -> None:
    box = FakeBox(ended(json.dumps(EXPECTED).encode(), status, code))
    assert (await reward(task("add-0-6"), "", box)).value == 0.0
    box.result = ended(json.dumps(EXPECTED).encode())
    assert (await reward(task("add-0-6"), "", box)).value == 1.0


async def test_no_expected_output_enters_the_sandbox() -> None:
    """Case 31: expected outputs were reachable from the candidate."""
    secret = Task(prompt="p", data={"inputs": [11]}, secret={"outputs": [987654321]})
    box = FakeBox(ended(b"[987654321]"))
    assert (await reward(secret, "reply", box)).value == 1.0
    assert b"987654321" not in box.entered
    assert b'outputs"' not in box.entered


def test_the_hidden_inputs_are_not_in_the_prompt() -> None:
    for one in tasks():
        assert str(one.data["inputs"]) not in one.chat[0].content
        assert len(one.data["inputs"]) == len(one.secret["outputs"]) == 6


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("```python\ndef f(x):\n    return 1\n```\n", "def f(x):\n    return 1"),
        ("```\ndef f(x): return 1\n```", "def f(x): return 1"),
        ("Here it is:\n\n```python\ndef f(x): return 1\n```\nIt adds.", "def f(x): return 1"),
        ("```python\ndef f(x):\n    return 1", "def f(x):\n    return 1"),
        ("def f(x): return 1", "def f(x): return 1"),
        ("def f(x): return 1\n```\nand more", "def f(x): return 1"),
        ("def f(x): return 1\n```python\nx", "def f(x): return 1"),
        ("```py\nf = 1\n```\n```py\nf = 2\n```", "f = 1"),
        ("", ""),
    ],
)
def test_code_is_the_first_block_or_the_whole_reply(reply: str, code: str) -> None:
    assert code_of(reply) == code


@pytest.mark.parametrize("opening", ["```python\n", "Sure, here it is:\n\n```python\n", "```\n"])
def test_the_stop_string_matches_the_closing_fence_and_not_the_opening_one(opening: str) -> None:
    reply = f"{opening}def f(x):\n    return 1\n```\nmore"
    ends = [reply[: reply.index(stop) + len(stop)] for stop in STOP if stop in reply]
    assert ends == [f"{opening}def f(x):\n    return 1\n```\n"]


@pytest.mark.parametrize("text", [b"", b"1", b"{}", b"[1] [1]", b"[1", b"\xff", b"[" * 60000, b"9" * 9999])
def test_what_is_no_list_is_no_output(text: bytes) -> None:
    assert parse_outputs(text) == []


def test_values_are_the_same_by_type_and_value() -> None:
    assert same(1, 1)
    assert same(True, True)
    assert not same(True, 1)
    assert not same(1.0, 1)
    assert not same(None, 0)
    assert not same([1], 1)


def test_held_out_constants_are_in_no_training_task() -> None:
    assert not set(HELD_OUT_CONSTANTS) & set(TRAINING_CONSTANTS)
    held_out, training = evaluation_tasks(), tasks()
    assert len(held_out) >= 36
    assert not {t.prompt for t in held_out} & {t.prompt for t in training}
    for wording in (w for operation in OPERATIONS for w in operation.wordings):
        for k in HELD_OUT_CONSTANTS:
            assert sum(wording.format(k=k) in (t.prompt or "") for t in held_out) == 1


def test_tasks_are_the_same_each_time_and_all_different() -> None:
    first, again = tasks(), tasks()
    assert [t.hash for t in first] == [t.hash for t in again]
    everything = [*first, *evaluation_tasks()]
    assert len({t.id for t in everything}) == len({t.hash for t in everything}) == len(everything)


@pytest.mark.parametrize("k", [*TRAINING_CONSTANTS, *HELD_OUT_CONSTANTS])
def test_six_inputs_tell_every_two_operations_apart(k: int) -> None:
    """Or a wrong function would be rewarded."""
    outputs = [[repr(o.function(x, k)) for x in inputs_for(k)] for o in OPERATIONS]
    for number, one in enumerate(outputs):
        assert one not in outputs[number + 1 :]
        assert len(set(one)) > 1, "a constant answer must not pass"
    near = [[repr(x >= k) for x in inputs_for(k)], [repr(x <= k) for x in inputs_for(k)]]
    assert not [one for one in near if one in outputs], "off by one must not pass"


def test_the_chat_template_adds_no_system_prompt() -> None:
    import jinja2

    text = (
        jinja2.Environment()
        .from_string(CHAT_TEMPLATE)
        .render(messages=[{"role": "user", "content": "hi"}], add_generation_prompt=True)
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
