"""What ``palestra serve`` was asked to serve: found, loaded, and given a version and a template.

A run stands for its latest whole checkpoint, and its chats are written as it wrote
them. A name that is neither a run nor a model is answered with both lists.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.cli.command import UsageError
from palestra.cli.runs import default_runs_dir
from palestra.errors import ChatError, ModelSourceError, PalestraError, boundary, nearest
from palestra.types import Boundary, Version

if TYPE_CHECKING:
    from torch import Tensor

    from palestra.models.tokenizer import Tokenizer
    from palestra.rollouts.native.engine import NativeEngine
    from palestra.rollouts.router import Router
    from palestra.rollouts.served.replica import ReplicaEngine
    from palestra.rollouts.server.serving import Renderer

_CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True)
class Served:
    """A model on this machine, and what it is called."""

    folder: Path
    name: str
    version: Version
    chat_template: str = "auto"


def find_served(spec: str, runs_dir: Path | None) -> Served:
    """The model that ``spec`` names: a run, a run's folder, a checkpoint, or any model spec."""
    from palestra.models.sources import SPEC_FORMS, resolve_model

    folder = runs_dir or default_runs_dir()
    for path in (folder / spec, Path(spec)):
        if (path / "run.json").is_file():
            return _latest(path)
    path = Path(spec).absolute()
    run = path.parent.parent
    if path.parent.name == _CHECKPOINTS and (run / "run.json").is_file() and path.name.isdigit():
        return _checkpoint(run, int(path.name), resolve_model(str(path)).folder)
    runs = sorted(p.parent.name for p in folder.glob("*/run.json"))
    try:
        model = resolve_model(spec)
    except ModelSourceError as error:
        if "/" in spec or ":" in spec:
            raise
        raise UsageError(
            f"there is no run and no model {spec!r}",
            where=str(folder),
            expected=f"a run ({', '.join(runs[:20]) or 'there is none yet'}), or {SPEC_FORMS}",
            nearest=nearest(spec, runs) or error.nearest,
            next_command="palestra runs list",
        ) from error
    name = model.folder.name if model.source == "folder" else spec
    return Served(model.folder, name, _version(name, 0))


def _latest(run: Path) -> Served:
    from palestra.models.sources import resolve_model
    from palestra.records.reader import RunReader

    whole = [entry for entry in RunReader(run).checkpoints() if entry.complete]
    if not whole:
        raise ModelSourceError(
            f"the run {run.name} has no checkpoint yet",
            where=str(run),
            expected="a run that has saved at least once",
            next_command=f"palestra runs show {run.name}",
        )
    return _checkpoint(run, whole[-1].step, resolve_model(str(whole[-1].path.absolute())).folder)


def _checkpoint(run: Path, step: int, folder: Path) -> Served:
    from palestra.records.reader import RunReader

    run = run.resolve()
    attempts = RunReader(run).attempts()
    resolved: Mapping[str, Any] = attempts[-1].get("resolved") or {} if attempts else {}
    template = resolved.get("chat_template")
    return Served(
        folder, run.name, _version(run.name, step), template if isinstance(template, str) else "auto"
    )


def _version(name: str, number: int) -> Version:
    return Version(re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("._-") or "model", number)


def build_engine(folder: Path, args: argparse.Namespace) -> NativeEngine | Router:
    """An engine for ``folder`` that has not been started; a router where several are asked for."""
    from palestra.models.dtypes import resolve_dtype
    from palestra.rollouts.native.engine import NativeEngine
    from palestra.rollouts.router import Router

    if args.replicas > 1:
        return Router({f"replica-{i}": build_replica(folder, args) for i in range(args.replicas)})
    return NativeEngine(
        folder,
        dtype=resolve_dtype(args.dtype),
        threads=args.threads,
        max_running=args.max_running,
        context_tokens=args.context_tokens,
        cache_mb=args.cache_mb,
    )


def build_replica(folder: Path, args: argparse.Namespace) -> ReplicaEngine:
    """One of several engines in processes of their own, with its share of the cores."""
    from palestra.models.dtypes import resolve_dtype
    from palestra.rollouts.native.threads import available_cores
    from palestra.rollouts.served.replica import ReplicaEngine

    return ReplicaEngine(
        folder,
        dtype=resolve_dtype(args.dtype),
        threads=args.threads or max(1, available_cores() // args.replicas),
        max_running=args.max_running,
        context_tokens=args.context_tokens,
        cache_mb=args.cache_mb,
    )


def load_weights(folder: Path, merge: Path | None) -> dict[str, Tensor]:
    """The folder's tensors, with the adapter in ``merge`` added to them."""
    from palestra.models.lora import merged, parse_adapter, read_adapter
    from palestra.models.tensors import load_tensors

    tensors = load_tensors(folder)
    if merge is None:
        return tensors
    config, parts = read_adapter(merge)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return dict(merged(tensors.items(), parse_adapter(config, parts.items(), shapes)))


def build_renderer(tokenizer: Tokenizer, template: str) -> Renderer | None:
    """How chats are written; None where the model brings no template and none was given."""
    if template == "auto" and tokenizer.chat_template is None:
        return None
    from palestra.environments.chat import Chat

    class ServedChat(Chat):
        """A chat whose messages and tools are OpenAI's objects, as templates know them."""

        def render(
            self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
        ) -> Sequence[int]:
            if messages[-1]["role"] == "assistant":
                raise ChatError(
                    "the last message is the assistant's own", expected="a user, tool or system message"
                )
            if self._template is None:
                return self.tokenizer.encode("".join(message["content"] for message in messages))
            try:
                with boundary(Boundary.CHAT, self.name):
                    text = self._template.render(
                        messages=messages,
                        tools=tools,
                        documents=None,
                        add_generation_prompt=True,
                        **self.tokenizer.special_tokens,
                    )
            except PalestraError as error:  # the template's refusal is the client's to mend
                raise ChatError(f"{self.name} refuses this chat: {error.__cause__}") from error
            return self.tokenizer.encode(text)

    return ServedChat(tokenizer, template)
