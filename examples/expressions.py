"""Train a small character model, made on this machine, to complete expressions; no model-written code is run.

The model sees "24=3" and should write "*7+3". Run it with `palestra train examples/expressions.py` or
`python examples/expressions.py`; the first time, making the model takes about a minute.
"""

import itertools

import palestra as pa
from palestra.recipes.expressions import REPLY_TOKENS, prepare_model

OPERATORS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
DIGITS = "0123456789"


def value(text):
    """The value of digit, operator, digit, operator, digit; None for anything else."""
    if len(text) != 5 or set(text[::2]) - set(DIGITS) or set(text[1::2]) - set(OPERATORS):
        return None
    a, first, b, second, c = text
    a, b, c = int(a), int(b), int(c)
    if second == "*" and first != "*":
        return OPERATORS[first](a, b * c)
    return OPERATORS[second](OPERATORS[first](a, b), c)


def make_tasks(held_out):
    """Every target and first digit that at least three expressions fit; one pair of five is held out."""
    ways = {}
    for parts in itertools.product(DIGITS, OPERATORS, DIGITS, OPERATORS, DIGITS):
        pair = value("".join(parts)), parts[0]
        ways[pair] = ways.get(pair, 0) + 1
    return [
        pa.Task(prompt=f"{target}={first}", secret={"target": target, "first": first})
        for (target, first), count in sorted(ways.items())
        if 0 <= target <= 30 and count >= 3 and ((3 * target + int(first)) % 5 == 0) == held_out
    ]


def reward(task, reply):
    """1 if the first digit and the reply together equal the target. The reply is parsed, never executed."""
    return float(value(task.secret["first"] + reply) == task.secret["target"])


job = pa.Job(
    model=str(prepare_model()),
    environment=pa.SingleTurn(make_tasks(False), reward, evaluation_tasks=make_tasks(True)),
    algorithm=pa.GRPO(group_size=8),
    sampling={"max_new_tokens": REPLY_TOKENS},
    optimizer={"learning_rate": 3e-4},
    chat_template="none",
    prompts_per_step=32,
    steps=60,
)

if __name__ == "__main__":
    run = job.train()
    print(run.id, run.status, run.checkpoints()[-1])
