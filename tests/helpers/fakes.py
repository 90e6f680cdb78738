"""A trainer and an engine small enough to reason about: one weight vector, logprobs read off it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from palestra.batches import Batch, LossSpec
from palestra.errors import TrainerError
from palestra.rollouts.base import EngineStats, GenerateRequest
from palestra.trainer.base import StepReport
from palestra.types import Completion, Manifest, SamplingParams, StopReason, Version
from palestra.weights.manifests import full_manifest


def logprobs_of(weight: Tensor, token_ids: Sequence[int]) -> tuple[float, ...]:
    """Any function of the weights will do, as long as both sides compute the same."""
    return tuple(-1.0 - float(weight[t % len(weight)]) ** 2 for t in token_ids[1:])


class FakeTrainer:
    """Adds the batch's weight sum times the rate to its vector; everything else follows the port."""

    def __init__(self, *, size: int = 8, write_error: OSError | None = None, finite: bool = True) -> None:
        self.weight = torch.linspace(0.0, 1.0, size)
        self.extra = torch.zeros(0, 3)
        self._updates = 0
        self.write_error = write_error
        self.finite = finite
        self.steps: list[Batch] = []

    def step(self, batch: Batch, loss: LossSpec, learning_rate: float) -> StepReport:
        self.steps.append(batch)
        if self.finite:
            push = sum(w * (1 + t) for w, t in zip(batch.weights_N, batch.targets_N, strict=True))
            self.weight = self.weight + learning_rate * (push or 1.0)
            self._updates += 1
        return StepReport(
            loss=-sum(batch.weights_N), grad_norm=1.0, learning_rate=learning_rate, logprob_mean=-1.0,
            entropy_mean=1.0, clip_fraction=0.0, mismatch_mean=0.0, mismatch_max=0.0, mismatch_kl=0.0,
            tokens=batch.token_count, targets=batch.target_count, seconds=0.0, applied=self.finite,
        )  # fmt: skip

    def logprobs(self, batch: Batch) -> tuple[float, ...]:
        return logprobs_of(self.weight, [0, *batch.targets_N])

    def export(self) -> Iterator[tuple[str, Tensor]]:
        yield "model.weight", self.weight
        yield "model.empty", self.extra

    def save_state(self, folder: Path) -> None:
        if self.write_error is not None:
            raise self.write_error
        state = {"weight": self.weight.tolist(), "updates": self._updates}
        (folder / "state.json").write_text(json.dumps(state))

    def load_state(self, folder: Path) -> None:
        try:
            state = json.loads((folder / "state.json").read_text())
        except (OSError, ValueError) as error:
            raise TrainerError(f"trainer state cannot be read: {error}", where=str(folder)) from error
        self.weight, self._updates = torch.tensor(state["weight"]), int(state["updates"])

    def save_model(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")

    @property
    def updates(self) -> int:
        return self._updates

    def close(self) -> None:
        return None


class MirrorEngine:
    """Holds what it was given and scores with it. Faults are switched on one by one."""

    def __init__(self) -> None:
        self.weight = torch.zeros(1)
        self._version: Version | None = None
        self._staged: tuple[Manifest, Tensor] | None = None
        self.flip_bit = False
        self.keep_old_weights = False
        self.stale_version = False
        self.serving: list[Version] = []

    def _take(self, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]]) -> str:
        received = {name: tensor.clone() for name, tensor in tensors}
        if self.flip_bit:
            received["model.weight"].view(torch.uint8)[3] ^= 1
        self._staged = (manifest, received["model.weight"])
        return full_manifest(manifest.version, received.items()).digest

    async def start(self, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]]) -> str:
        digest = self._take(manifest, tensors)
        await self.commit(manifest.version)
        return digest

    async def stage(self, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]]) -> str:
        return self._take(manifest, tensors)

    async def commit(self, version: Version) -> None:
        assert self._staged is not None
        if not (self.keep_old_weights and self._version is not None):
            self.weight = self._staged[1]
        if not (self.stale_version and self._version is not None):
            self._version = version
        self.serving.append(version)

    async def score(self, token_ids: Sequence[int], sampling: SamplingParams) -> tuple[float, ...]:
        return logprobs_of(self.weight, token_ids)

    async def generate(self, request: GenerateRequest) -> Completion:
        assert self._version is not None
        n = self._version.number
        return Completion((1, 2), (-0.1, -0.1), (n, n), StopReason.EOS)

    @property
    def version(self) -> Version | None:
        return self._version

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0, 0.0)

    async def close(self) -> None:
        return None
