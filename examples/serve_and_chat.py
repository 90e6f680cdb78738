"""Serve a checkpoint and chat with it, through OpenAI's own client.

`python examples/serve_and_chat.py quickstart` takes the latest checkpoint of the run quickstart; a model's
folder or name, or one checkpoint's folder, will do as well. Needs `pip install openai 'palestra[serve]'`.
"""

import re
import subprocess
import sys
from contextlib import contextmanager

from openai import OpenAI

QUESTIONS = ["Write a Python function that doubles a number.", "And one that halves it."]


@contextmanager
def serving(model):
    """The address of a server of `model` on a free port; it ends with the block."""
    command = [sys.executable, "-m", "palestra", "serve", model, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        said = re.search(r"http://\S+/v1", server.stdout.readline())
        if said is None:
            sys.exit(server.wait())  # it has said why
        yield said[0]
    finally:
        server.terminate()
        server.wait()


def main(model="quickstart"):
    with serving(model) as url:
        client = OpenAI(base_url=url, api_key="none")
        name = client.models.list().data[0].id
        messages = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            answer = ""
            stream = client.chat.completions.create(
                model=name, messages=messages, max_tokens=64, temperature=0.7, seed=1, stream=True
            )
            for chunk in stream:
                piece = chunk.choices[0].delta.content or ""
                print(piece, end="", flush=True)
                answer += piece
            print("\n--")
            messages.append({"role": "assistant", "content": answer})
        sample = client.chat.completions.create(
            model=name, messages=messages[:1], max_tokens=16, n=2, logprobs=True,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        for choice in sample.choices:
            print("tokens", choice.token_ids, "by [version, from, to]", choice.version_spans)


if __name__ == "__main__":
    main(*sys.argv[1:])
