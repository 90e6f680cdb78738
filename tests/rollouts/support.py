"""What the tests of this room build on: the tiny model's parts, manifests, requests in bulk."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from palestra.models.config import ModelConfig
from palestra.rollouts.base import GenerateRequest
from palestra.rollouts.native.engine import NativeEngine
from palestra.rollouts.native.layers import Model
from palestra.rollouts.native.linears import LinearOps
from palestra.rollouts.native.weights import Weights, load
from palestra.types import Completion, Manifest, SamplingParams, TensorEntry, Version

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def manifest_of(tensors: dict[str, Tensor], number: int = 0) -> Manifest:
    """The manifest of ``tensors``, hashed here and not by the code under test."""
    entries = [
        TensorEntry(
            name,
            DTYPES[t.dtype],
            tuple(t.shape),
            t.nbytes,
            xxhash.xxh3_128_hexdigest(t.contiguous().view(torch.uint8).numpy().tobytes()),
        )
        for name, t in tensors.items()
    ]
    return Manifest(Version("test", number), "full", None, tuple(entries))


@dataclass(frozen=True)
class Tiny:
    """The folder, its config and its tensors."""

    folder: Path
    config: ModelConfig
    tensors: dict[str, Tensor]

    def weights(
        self, *, packed: bool = True, threads: int = 1, compiled: bool = True
    ) -> tuple[Model, Weights]:
        ops = LinearOps(torch.float32, packed, threads)
        loaded, _ = load(self.config, ops, manifest_of(self.tensors), self.tensors.items())
        return Model.build(self.config, ops, self.config.max_positions, compiled=compiled), loaded

    def changed(self, seed: int = 1, scale: float = 0.3) -> dict[str, Tensor]:
        """Other weights of the same shapes."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: t + scale * t.std() * torch.randn(t.shape, generator=generator)
            for name, t in self.tensors.items()
        }


def versions_alive() -> int:
    """How many whole sets of weights are in memory, wherever they are held."""
    gc.collect()
    return sum(type(thing) is Weights for thing in gc.get_objects())


def engine_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("palestra-decode", "palestra-stage"))]


async def generate_all(
    engine: NativeEngine, prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams]
) -> list[Completion]:
    """Submit every prompt in one iteration of the event loop."""
    requests = [
        GenerateRequest(tuple(prompt), sampling, str(i))
        for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    return await asyncio.gather(*(engine.generate(request) for request in requests))


def ragged_prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """``count`` prompts of 1 to ``longest`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]
