"""The quick start's model, if this machine has it already: numbers against transformers. Slow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from palestra.models.cache import default_cache
from palestra.models.tensors import load_tensors
from palestra.models.tokenizer import Tokenizer
from palestra.rollouts.base import GenerateRequest
from palestra.rollouts.native.engine import NativeEngine
from palestra.types import SamplingParams
from rollouts.support import generate_all, manifest_of

FOLDERS = sorted(path.parent for path in default_cache().glob("models/*smollm2*/config.json"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDERS, reason="SmolLM2 is not in the cache"),
    pytest.mark.timeout(600),
]
TEXT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def network() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDERS[0], dtype=torch.float32).eval()


async def test_scores_and_greedy_tokens_equal_those_of_transformers(network: Any) -> None:
    tokenizer = Tokenizer.from_folder(FOLDERS[0])
    prompts = [
        tokenizer.encode(TEXT.format(question))
        for question in ("What is the capital of France?", "Write a Python function f(x) that returns x + 3.")
    ]
    tensors = load_tensors(FOLDERS[0])
    engine = NativeEngine(FOLDERS[0], dtype="fp32", threads=1)
    await engine.start(manifest_of(tensors), tensors.items())
    greedy = SamplingParams(max_new_tokens=12, temperature=0)
    for prompt, done in zip(prompts, await generate_all(engine, prompts, [greedy] * 2), strict=True):
        sequence = [*prompt, *done.token_ids]
        with torch.no_grad():
            logits = network(torch.tensor([sequence])).logits[0, :-1]
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == list(done.token_ids)
        theirs = torch.log_softmax(logits, -1).gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
        scores = await engine.score(sequence, greedy)
        assert scores == pytest.approx(theirs.tolist(), abs=1e-4)
        assert done.logprobs == pytest.approx(theirs[len(prompt) - 1 :].tolist(), abs=1e-4)
    await engine.close()


async def test_a_sample_is_the_same_bits_alone_and_among_others() -> None:
    """A resumed run must repeat its rollouts although other requests run beside them."""
    tokenizer = Tokenizer.from_folder(FOLDERS[0])
    prompts = [tokenizer.encode(TEXT.format(f"Name {n} animals.")) for n in range(2, 7)]
    samplings = [SamplingParams(max_new_tokens=4 + i, seed=i, top_p=0.95) for i in range(5)]
    tensors = load_tensors(FOLDERS[0])
    engine = NativeEngine(FOLDERS[0], dtype="fp32", threads=2)
    await engine.start(manifest_of(tensors), tensors.items())
    together = await generate_all(engine, prompts, samplings)
    for prompt, sampling, expected in zip(prompts[:2], samplings, together, strict=False):
        assert await engine.generate(GenerateRequest(tuple(prompt), sampling)) == expected
    await engine.close()
