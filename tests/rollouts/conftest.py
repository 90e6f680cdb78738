"""A tiny model, transformers' view of it, and an engine that serves it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.tiny import make_tiny_model
from palestra.models.config import ModelConfig
from palestra.models.tensors import load_tensors
from palestra.rollouts.native.engine import NativeEngine
from rollouts.support import Tiny, manifest_of


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    return Tiny(folder, ModelConfig.from_folder(folder), load_tensors(folder))


@pytest.fixture(scope="session")
def reference(tiny: Tiny) -> Any:
    """The same model in transformers."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.float32).eval()


Start = Callable[..., Awaitable[NativeEngine]]


@pytest.fixture
async def serve(tiny: Tiny) -> AsyncIterator[Start]:
    """``await serve(max_running=8, ...)`` gives a started engine, closed after the test."""
    engines: list[NativeEngine] = []

    async def start(tensors: dict[str, Tensor] | None = None, **options: Any) -> NativeEngine:
        folder = options.pop("folder", tiny.folder)
        engine = NativeEngine(folder, **{"dtype": "fp32", "threads": 1, "max_running": 8} | options)
        engines.append(engine)
        served = tensors or tiny.tensors
        await engine.start(manifest_of(served), served.items())
        return engine

    yield start
    for engine in engines:
        await engine.close()
