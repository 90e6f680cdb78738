"""A character model made from nothing loads everywhere, is the same for a seed, and overwrites nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.errors import ModelSourceError
from palestra.models import scratch
from palestra.models.config import ModelConfig
from palestra.models.llama import Llama
from palestra.models.scratch import EOS, PAD, make_character_model
from palestra.models.sources import resolve_model
from palestra.models.tensors import load_tensors
from palestra.models.tokenizer import Tokenizer

ALPHABET = "0123456789+-*="


def small(folder: Path, *, alphabet: str = ALPHABET, seed: int = 0, **sizes: int) -> Path:
    chosen = {"layers": 1, "hidden": 8, "intermediate": 12, "heads": 2, "max_positions": 16, **sizes}
    return make_character_model(folder, alphabet=alphabet, seed=seed, **chosen)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_folder(model)


def test_the_config_says_what_was_asked_for(tmp_path: Path) -> None:
    folder = small(tmp_path / "m", layers=2, hidden=16, intermediate=20, heads=4, kv_heads=2, max_positions=9)
    config = ModelConfig.from_folder(folder)
    assert (config.layers, config.hidden_size, config.intermediate_size) == (2, 16, 20)
    assert (config.heads, config.kv_heads, config.head_dim, config.max_positions) == (4, 2, 4, 9)
    assert config.vocab_size == 2 + len(ALPHABET)
    assert config.eos_token_ids == (1,)
    assert config.bos_token_id is None
    assert config.tied_embeddings


def test_without_kv_heads_every_head_has_its_own(model: Path) -> None:
    config = ModelConfig.from_folder(model)
    assert config.kv_heads == config.heads == 2


def test_the_default_sizes_make_the_small_model_of_the_expression_task(tmp_path: Path) -> None:
    folder = make_character_model(tmp_path / "m", alphabet=ALPHABET)
    count = sum(tensor.numel() for tensor in load_tensors(folder).values())
    assert 850_000 < count < 870_000


def test_weights_are_fp32_and_centred_and_norms_are_one(tmp_path: Path) -> None:
    tensors = load_tensors(small(tmp_path / "m", hidden=64, intermediate=64, heads=4))
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32
        if tensor.ndim == 1:
            assert torch.equal(tensor, torch.ones(64)), name
        else:
            assert abs(tensor.mean().item()) < 0.02, name
            assert tensor.std().item() == pytest.approx(64**-0.5, rel=0.1), name


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    first, again = small(tmp_path / "a", seed=5), small(tmp_path / "b", seed=5)
    other = small(tmp_path / "c", seed=6)
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (again / name).read_bytes(), name
        if name != "model.safetensors":
            assert (first / name).read_bytes() == (other / name).read_bytes(), name
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_making_a_model_leaves_torchs_own_generator_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    small(tmp_path / "m")
    assert torch.equal(torch.rand(4), expected)


def test_the_module_takes_the_tensors_and_its_logits_are_finite(model: Path) -> None:
    from palestra.trainer.settings import TrainerSettings
    from palestra.trainer.torch_trainer import TorchTrainer
    from palestra.weights.sync import probe_batch

    config = ModelConfig.from_folder(model)
    assert Llama.from_tensors(config, load_tensors(model)).config == config
    trainer = TorchTrainer(model, TrainerSettings(threads=1))
    logprobs = trainer.logprobs(probe_batch((4, 6, 15, 3)))
    assert all(-10 < value < 0 for value in logprobs)
    trainer.close()


def test_transformers_loads_model_and_tokenizer_and_computes_the_same(
    model: Path, tokenizer: Tokenizer
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from palestra.trainer.settings import TrainerSettings
    from palestra.trainer.torch_trainer import TorchTrainer
    from palestra.weights.sync import probe_batch

    torch.set_num_threads(1)
    theirs = AutoTokenizer.from_pretrained(model)
    text = "24=3*8+0"
    ids = tokenizer.encode(text)
    assert theirs(text).input_ids == ids
    assert theirs.decode(ids) == text
    assert (theirs.eos_token, theirs.pad_token, theirs.bos_token) == (EOS, PAD, None)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert loaded.config.eos_token_id == 1
    assert loaded.config.bos_token_id is None
    with torch.no_grad():
        logits = loaded(torch.tensor([ids])).logits[0, :-1]
    reference = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    trainer = TorchTrainer(model, TrainerSettings(threads=1))
    assert trainer.logprobs(probe_batch(tuple(ids))) == pytest.approx(reference.tolist(), abs=1e-5)
    trainer.close()


def test_what_transformers_saves_again_still_loads_here(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(model).save_pretrained(tmp_path / "again")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "again")
    assert ModelConfig.from_folder(tmp_path / "again").vocab_size == 2 + len(ALPHABET)
    assert Tokenizer.from_folder(tmp_path / "again").encode("24=") == [4, 6, 15]


def test_a_job_may_name_the_folder_as_its_model(model: Path) -> None:
    found = resolve_model(str(model))
    assert found.folder == model.resolve()
    assert len(found.digest) == 64


def test_one_character_is_one_token_in_the_alphabets_order(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 2 + len(ALPHABET)
    for index, char in enumerate(ALPHABET):
        assert tokenizer.encode(char) == [2 + index]
        assert tokenizer.token_bytes(2 + index) == char.encode()


@settings(deadline=None)
@given(text=st.text(alphabet=ALPHABET, max_size=40))
def test_text_over_the_alphabet_comes_back_unchanged(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_special_tokens_written_in_a_text_are_parsed(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(f"7{EOS}{PAD}") == [9, 1, 0]
    assert tokenizer.eos_token_ids == (1,)
    assert tokenizer.decode([9, 1]) == f"7{EOS}"


@pytest.mark.parametrize("text", ["2x", " 24=", "24=\n", "２４=", "٢", "é", "24= 3", "😀", "\x00"])
def test_a_character_outside_the_alphabet_is_an_error_and_never_dropped(
    tokenizer: Tokenizer, text: str
) -> None:
    """The kind of trl#5224 and ART#726: text that quietly goes missing on its way to the model."""
    with pytest.raises(Exception, match="UNK"):
        tokenizer.encode(text)


@settings(max_examples=15, deadline=None)
@given(alphabet=st.sets(st.characters(max_codepoint=127), min_size=1, max_size=12).map(sorted).map("".join))
def test_any_ascii_alphabet_round_trips_spaces_and_control_characters_too(alphabet: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        made = Tokenizer.from_folder(small(Path(folder) / "m", alphabet=alphabet))
    ids = made.encode(alphabet)
    assert ids == list(range(2, 2 + len(alphabet)))
    assert made.decode(ids) == alphabet


@pytest.mark.parametrize(
    ("alphabet", "reason"), [("", "empty"), ("aba", "'a' twice"), ("aé", "'é', which is not ASCII")]
)
def test_an_alphabet_that_cannot_be_one_token_a_character_is_refused(
    tmp_path: Path, alphabet: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        small(tmp_path / "m", alphabet=alphabet)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "sizes",
    [{"heads": 3, "kv_heads": 2, "hidden": 12}, {"heads": 0}, {"hidden": 6, "heads": 2}, {"layers": 0}],
)
def test_sizes_that_make_no_model_are_refused_and_leave_nothing(
    tmp_path: Path, sizes: dict[str, int]
) -> None:
    with pytest.raises(ValueError, match="these sizes make no model"):
        small(tmp_path / "m", **sizes)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ModelSourceError, match="not empty"):
        small(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(ModelSourceError, match="not empty"):
        small(tmp_path / "thesis.txt")
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_an_empty_folder_and_absent_parents_are_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert ModelConfig.from_folder(small(tmp_path / "empty")).layers == 1
    assert ModelConfig.from_folder(small(tmp_path / "a" / "b" / "c")).layers == 1


def test_a_failure_while_writing_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path, tensors: object) -> Path:
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr(scratch, "save_tensors", full)
    with pytest.raises(ModelSourceError, match="No space left"):
        small(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_a_kill_while_writing_leaves_nothing_under_the_models_name(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from palestra.models import scratch\n"
        "scratch.save_tensors = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "scratch.make_character_model(Path(sys.argv[1]), alphabet='ab', layers=1, hidden=8, heads=2)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "m")], check=False)
    assert done.returncode == -9
    assert not (tmp_path / "m").exists()
    assert ModelConfig.from_folder(small(tmp_path / "m")).layers == 1
