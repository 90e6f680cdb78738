"""The trainer port: packed tokens with per-token weights in, one optimiser update out.

A trainer is algorithm-blind: the loss is a sum over targets of a declared term
times a weight that already holds advantage and normaliser, so the result does
not depend on packing or on the split into micro-batches. It owns the fp32
masters and the optimiser state, and is the only place that knows how its
tensors are named outside (Hugging Face names). Methods are synchronous and
called from one thread at a time; the loop runs them off its event loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from palestra.batches import Batch, LossSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one update did. Means run over the batch's targets."""

    loss: float
    grad_norm: float
    """Global L2 norm before clipping."""
    learning_rate: float
    logprob_mean: float
    entropy_mean: float
    """Nats per target, of the distribution the targets were sampled from."""
    clip_fraction: float
    """Share of targets whose ratio was clipped."""
    mismatch_mean: float
    """Mean |trainer logprob - sampler logprob|, before the update."""
    mismatch_max: float
    mismatch_kl: float
    """k3 estimate of KL(sampler || trainer) in nats (Schulman 2020, joschu.net/blog/kl-approx)."""
    tokens: int
    targets: int
    seconds: float
    applied: bool
    """False where loss or gradient was not finite: nothing was updated."""
    kl_mean: float = 0.0
    """k3 estimate of KL(policy || reference) in nats per target; 0 without reference logprobs."""
    batch_file: str = ""
    """Where the batch of a skipped update was written, if anywhere."""


class Trainer(Protocol):
    def step(self, batch: Batch, loss: LossSpec, learning_rate: float) -> StepReport:
        """One forward, backward and optimiser update over the whole batch.

        A non-finite loss or gradient skips the update (``applied`` False) and leaves
        every weight and the optimiser state untouched. Raises TrainerError for a
        batch without targets or with a token outside the vocabulary. After any other
        exception the state is unknown: load a checkpoint.
        """
        ...

    def logprobs(self, batch: Batch) -> tuple[float, ...]:
        """Logprobs of the batch's targets (length N) under the present weights."""
        ...

    def reference_logprobs(self, batch: Batch) -> tuple[float, ...]:
        """The same under the policy that a KL term holds on to: the starting model, or a running mean."""
        ...

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter under its Hugging Face name, in the rollout dtype, detached, in a stable order.

        A tensor is valid only until the next ``step``: copy what is kept. Tied
        weights appear once, under the input embedding's name.
        """
        ...

    def save_state(self, folder: Path) -> None:
        """Write masters, optimiser state and update count; ``load_state`` restores them bit for bit."""
        ...

    def load_state(self, folder: Path) -> None:
        """Raises TrainerError if a file is missing, cut short or of another model; then nothing changed."""
        ...

    def save_model(self, folder: Path) -> None:
        """Write config, tokenizer files and safetensors (the source's dtype) in Hugging Face layout."""
        ...

    @property
    def updates(self) -> int:
        """Optimiser updates applied since the starting model."""
        ...

    def close(self) -> None: ...
