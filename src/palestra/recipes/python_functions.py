"""The quick start's task: write a small Python function; what the model writes runs in a sandbox.

The candidate and the grader never share a process. Into the sandbox go the
reply's code and six inputs, in one start; out come the function's outputs, which
are compared here, by exact type and value, with expected ones that never entered.
So a candidate that forges what the sandbox prints can only supply outputs, and
wrong ones stay wrong. Whatever the candidate does to itself (a crash, a timeout,
a flood of output) scores 0; a sandbox that fails raises SandboxError, and the
episode abstains.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from palestra.sandboxes.base import Sandbox, SandboxSpec
from palestra.types import Reward, Task

Value = int | bool

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML without the system prompt that the model's own template adds: it costs 20 tokens a prompt."""

PROMPT = "Write a Python function f(x) that {what}. Answer with the code only, starting with def f(x):"
"""Without its last sentence the small model often talks first, and names the function otherwise."""

STOP = ("\n```\n",)
"""A closing fence on a line of its own. An opening one carries a language name, or starts the reply."""

SPEC = SandboxSpec(memory_mb=128, scratch_mb=1, time_s=2.0, processes=1, output_kb=64)
"""What a candidate may use: the functions asked for need none of it."""

TRAINING_CONSTANTS = (2, 3, 4, 5, 7, 8, 10, 11, 12)
HELD_OUT_CONSTANTS = (6, 9)
"""No training prompt contains them."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One function to ask for, in one or more wordings; ``{k}`` in a wording is the constant."""

    name: str
    wordings: tuple[str, ...]
    function: Callable[[int, int], Value]


OPERATIONS = (
    Operation("add", ("returns x plus {k}", "adds {k} to x and returns the result"), lambda x, k: x + k),
    Operation("subtract", ("returns x minus {k}", "subtracts {k} from x and returns the result"),
              lambda x, k: x - k),
    Operation("multiply", ("returns x times {k}", "multiplies x by {k} and returns the result"),
              lambda x, k: x * k),
    Operation("remainder", ("returns the remainder of x divided by {k}", "returns x modulo {k}"),
              lambda x, k: x % k),
    Operation("greater", ("returns True if x is greater than {k}, and False otherwise",
                          "returns whether x is greater than {k}"), lambda x, k: x > k),
    Operation("less", ("returns True if x is less than {k}, and False otherwise",
                       "returns whether x is less than {k}"), lambda x, k: x < k),
    Operation("divisible", ("returns True if x is divisible by {k}, and False otherwise",
                            "returns whether x is a multiple of {k}"), lambda x, k: x % k == 0),
    Operation("maximum", ("returns the maximum of x and {k}", "returns the larger of x and {k}"),
              lambda x, k: max(x, k)),
    Operation("minimum", ("returns the minimum of x and {k}", "returns the smaller of x and {k}"),
              lambda x, k: min(x, k)),
)  # fmt: skip

PLAIN_OPERATIONS = (
    Operation("square", ("returns the square of x",), lambda x, _k: x * x),
    Operation("even", ("returns True if x is even, and False otherwise",), lambda x, _k: x % 2 == 0),
    Operation("absolute", ("returns the absolute value of x",), lambda x, _k: abs(x)),
)
"""Without a constant: for training only."""


def inputs_for(k: int) -> tuple[int, ...]:
    """Six inputs on both sides of zero and of ``k``, with ``k`` itself and multiples of it."""
    return (-5, 0, 1, k, 2 * k, 2 * k + 1)


def tasks() -> list[Task]:
    """The training tasks, in a fixed order."""
    return [*_tasks(OPERATIONS, TRAINING_CONSTANTS), *_tasks(PLAIN_OPERATIONS, (3,))]


def evaluation_tasks() -> list[Task]:
    """Every wording with the constants that no training task holds."""
    return list(_tasks(OPERATIONS, HELD_OUT_CONSTANTS))


def _tasks(operations: Sequence[Operation], constants: Sequence[int]) -> Iterable[Task]:
    for operation in operations:
        for number, wording in enumerate(operation.wordings):
            for k in constants:
                inputs = inputs_for(k)
                yield Task(
                    prompt=PROMPT.format(what=wording.format(k=k)),
                    data={"inputs": list(inputs)},
                    secret={"outputs": [operation.function(x, k) for x in inputs]},
                    id=f"{operation.name}-{number}-{k}",
                )


class HasSandbox(Protocol):
    """All that the reward needs of an episode."""

    def sandbox(self) -> AbstractAsyncContextManager[Sandbox]: ...


async def reward(task: Task, reply: str, ep: HasSandbox) -> Reward:
    """1 if the reply's ``f`` gives every expected output, else 0. Raises SandboxError: the sandbox failed."""
    expected: list[Value] = task.secret["outputs"]
    question = json.dumps({"code": code_of(reply), "inputs": task.data["inputs"]}).encode()
    async with ep.sandbox() as box:
        result = await box.python(HARNESS, stdin=question)
    outputs = parse_outputs(result.stdout) if result.ok else []
    right = len(outputs) == len(expected) and all(map(same, outputs, expected))
    return Reward(1.0 if right else 0.0, {"answered": 1.0 if len(outputs) == len(expected) else 0.0})


_BLOCK = re.compile(r"```[a-zA-Z0-9]*[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
_DEFINITION = re.compile(r"^def f\b", re.MULTILINE)


def code_of(reply: str) -> str:
    """The first fenced block, which the reply's end may leave open; without a fence, the whole reply."""
    head = reply.partition("```")[0]
    if _DEFINITION.search(head):  # no opening fence: the first one there is closes
        return head.rstrip()
    block = _BLOCK.search(reply)
    return block[1] if block else reply


def same(left: object, right: object) -> bool:
    """Equal in type and value: True is not 1, and 1.0 is not 1."""
    return type(left) is type(right) and left == right


def parse_outputs(text: bytes) -> list[object]:
    """The outputs that the sandbox printed; anything but one JSON list is no output at all."""
    try:
        outputs = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return outputs if isinstance(outputs, list) else []


HARNESS = r"""
import json, os, sys

question = json.loads(sys.stdin.buffer.read())
# What the candidate prints goes nowhere: the results alone leave on the real stdout.
results = os.dup(1)
nowhere = os.open("/dev/null", os.O_WRONLY)
os.dup2(nowhere, 1)
dumps, write, leave, plain = json.dumps, os.write, os._exit, (int, bool)

scope = {"__name__": "candidate"}
try:
    exec(compile(question["code"], "candidate.py", "exec"), scope)
except SystemExit:
    pass  # an answer may end in sys.exit(); its function still counts

outputs = []
for x in question["inputs"]:
    try:
        value = scope["f"](x)
    except (Exception, SystemExit) as error:
        value = None
        print(type(error).__name__, file=sys.stderr)
    outputs.append(value if type(value) in plain else None)
write(results, dumps(outputs).encode())
leave(0)
"""
"""Reads {"code", "inputs"} from stdin. A candidate can reach all of it, and gains nothing by it."""
