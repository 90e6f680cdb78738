"""The trainer on plain torch, one process, CPU: fp32 masters, AdamW, packed forests.

An update is a function of the masters, the optimiser state, the batch and the
thread count: nothing else goes in, so equal inputs give equal bits, also across
``save_state`` and ``load_state``. Micro-batches only add to one gradient; since
the weights in a batch already hold its global normaliser, where it is cut
changes rounding and nothing else. Nothing is applied unless loss and gradient
are finite. Every failure that leaves here is a TrainerError.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from palestra.algorithms.losses import SequenceRatio, TargetLoss, kl_estimate, sequence_ratio, target_loss
from palestra.algorithms.packing import Part, partition
from palestra.batches import Batch, LossSpec
from palestra.errors import TrainerError, boundary
from palestra.models.config import ModelConfig
from palestra.models.dtypes import TORCH_DTYPES
from palestra.models.folder import copy_model_files
from palestra.models.functions import gradient_of
from palestra.models.llama import Llama
from palestra.models.tensors import load_tensors, save_tensors
from palestra.trainer.adamw import MOMENTS, AdamW
from palestra.trainer.base import StepReport
from palestra.trainer.head import Distribution, Head, HeadResult, TermOf
from palestra.trainer.memory import keep_freed_memory
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.state_files import INDEX, check_file, read_index, read_into, write_state
from palestra.trainer.tree_attention import TreeAttention
from palestra.types import Boundary

MASTERS = "masters"


class TorchTrainer:
    """Implements `palestra.trainer.base.Trainer`."""

    def __init__(self, folder: Path, settings: TrainerSettings) -> None:
        """Load ``folder``'s weights; ModelSourceError if they are missing, damaged or of another shape."""
        keep_freed_memory()
        self.settings = settings
        self.folder = folder
        self.config = ModelConfig.from_folder(folder)
        tensors = load_tensors(folder)
        self._source_dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        self._model = Llama.from_tensors(self.config, tensors, TORCH_DTYPES[settings.dtype])
        self._masters = dict(self._model.named_parameters())
        self._head = Head(self.config.vocab_size)
        self._thread_count = settings.threads or torch.get_num_threads()
        self._optimizer: AdamW | None = None
        self._closed = False

    @property
    def updates(self) -> int:
        return self._optimizer.updates if self._optimizer else 0

    def step(self, batch: Batch, loss: LossSpec, learning_rate: float) -> StepReport:
        start = time.perf_counter()
        self._check(batch)
        if not (math.isfinite(learning_rate) and learning_rate >= 0):
            raise TrainerError(f"the learning rate must be finite and >= 0, got {learning_rate}")
        with boundary(Boundary.TRAINER, "the training step"), self._threads():
            optimizer = self._prepare()
            try:
                results = [
                    (part, self._backward(part.batch, loss)) for part in _with_targets(batch, self.settings)
                ]
                total = sum(result.loss for _, result in results)
                norm = optimizer.gradient_norm()
                applied = math.isfinite(total) and math.isfinite(norm)
                if applied:
                    optimizer.update(learning_rate, norm)
            finally:
                optimizer.free_gradients()
            return _report(batch, results, total, norm, learning_rate, applied, start)

    def logprobs(self, batch: Batch) -> tuple[float, ...]:
        self._check(batch)
        with boundary(Boundary.TRAINER, "computing logprobs"), self._threads(), torch.no_grad():
            found = torch.empty(batch.target_count)
            for part in _with_targets(batch, self.settings):
                hidden = self._model(*_columns(part.batch), TreeAttention(part.batch))
                rows = _long(part.batch.predictors_N)
                logprobs, _ = self._head.score(
                    hidden.index_select(0, rows),
                    self._model.head_weight,
                    _long(part.batch.targets_N),
                    _distribution(batch),
                )
                found[_long(part.target_rows)] = logprobs
            return tuple(found.tolist())

    def export(self) -> Iterator[tuple[str, Tensor]]:
        self._check_open()
        dtype = TORCH_DTYPES[self.settings.rollout_dtype]
        masters = tuple(self._masters.items())  # a close while the exporter is iterated must not break it
        return ((name, parameter.detach().to(dtype)) for name, parameter in masters)

    def save_state(self, folder: Path) -> None:
        self._check_open()
        with boundary(Boundary.TRAINER, f"saving the trainer state to {folder}"), self._threads():
            write_state(folder, self._state(), self.updates, self._fingerprint())

    def load_state(self, folder: Path) -> None:
        self._check_open()
        with boundary(Boundary.TRAINER, f"loading the trainer state from {folder}"), self._threads():
            index = read_index(folder)
            self._check_fingerprint(index.fingerprint, folder)
            shapes = {name: master.shape for name, master in self._masters.items()}
            for part in (MASTERS, *MOMENTS):
                name = f"{part}.safetensors"
                check_file(folder / name, index.files.get(name), shapes)
            for part, tensors in self._state().items():
                read_into(folder / f"{part}.safetensors", tensors)
            self._prepare().updates = index.updates

    def save_model(self, folder: Path) -> None:
        self._check_open()
        with boundary(Boundary.TRAINER, f"saving the model to {folder}"):
            copy_model_files(self.folder, folder)
            save_tensors(folder, self._masters, self._source_dtypes)

    def close(self) -> None:
        """Free the weights and the optimiser state; every other method then raises TrainerError."""
        if self._closed:
            return
        self._closed = True
        self._optimizer = None
        self._masters.clear()
        del self._model, self._head

    def _backward(self, batch: Batch, loss: LossSpec) -> HeadResult:
        """Add this micro-batch's gradient to the masters'."""
        hidden = self._model(*_columns(batch), TreeAttention(batch))
        predictors = _long(batch.predictors_N)
        head_weight = self._model.head_weight
        hidden_NH = hidden.detach().index_select(0, predictors)
        result = self._head.train(
            hidden_NH,
            head_weight.detach(),
            _long(batch.targets_N),
            _distribution(batch),
            _term_of(loss, batch, self._sequence_ratio(loss, batch, hidden_NH)),
            gradient_of(head_weight),
        )
        hidden.backward(torch.zeros_like(hidden).index_add_(0, predictors, result.hidden_grad_NH))
        return result

    def _sequence_ratio(self, loss: LossSpec, batch: Batch, hidden_NH: Tensor) -> SequenceRatio | None:
        """Needs all logprobs of a sequence before its first term; a sequence lies in one micro-batch."""
        log_ratio_N = None
        if loss.ratio != "token" and batch.old_logprobs_N is not None:
            logprobs_N, _ = self._head.score(
                hidden_NH, self._model.head_weight, _long(batch.targets_N), _distribution(batch)
            )
            log_ratio_N = logprobs_N - _float(batch.old_logprobs_N)
        return sequence_ratio(loss.ratio, _long(batch.sequence_ids_N), log_ratio_N)

    def _prepare(self) -> AdamW:
        """The optimiser, whose moments are allocated at first use and then kept."""
        if self._optimizer is None:
            self._optimizer = AdamW(self._masters, self.settings)
        return self._optimizer

    def _state(self) -> dict[str, Mapping[str, Tensor]]:
        return {MASTERS: self._masters, **self._prepare().moments}

    def _fingerprint(self) -> dict[str, Any]:
        shapes = [[name, list(master.shape)] for name, master in self._masters.items()]
        model = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
        return {"model": model, **self.settings.fingerprint()}

    def _check_fingerprint(self, found: Mapping[str, Any], folder: Path) -> None:
        own = self._fingerprint()
        different = [name for name in own if found.get(name) != own[name]]
        if different:
            shown = ", ".join(f"{name} {found.get(name)!r}" for name in different)
            raise TrainerError(
                f"the trainer state was saved with another {' and '.join(different)}: {shown}",
                where=str(folder / INDEX),
                expected=", ".join(f"{name} {own[name]!r}" for name in different),
            )

    def _check_open(self) -> None:
        if self._closed:
            raise TrainerError("the trainer is closed")

    def _check(self, batch: Batch) -> None:
        self._check_open()
        if not batch.target_count:
            raise TrainerError("the batch holds no target: there is nothing to train")
        for what, column in (("tokens_T", batch.tokens_T), ("targets_N", batch.targets_N)):
            worst = max(column) if min(column) >= 0 else min(column)
            if not 0 <= worst < self.config.vocab_size:
                raise TrainerError(
                    f"{what} holds the token {worst}, which is outside the vocabulary",
                    expected=f"0 to {self.config.vocab_size - 1}",
                )

    @contextmanager
    def _threads(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(self._thread_count)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _with_targets(batch: Batch, settings: TrainerSettings) -> list[Part]:
    return [p for p in partition(batch, settings.micro_batch_tokens) if p.batch.target_count]


def _long(column: array[int]) -> Tensor:
    return torch.frombuffer(column, dtype=torch.int64)


def _float(column: array[float]) -> Tensor:
    return torch.frombuffer(column, dtype=torch.float32)


def _optional(column: array[float] | None) -> Tensor | None:
    return None if column is None else _float(column)


def _columns(batch: Batch) -> tuple[Tensor, Tensor]:
    return _long(batch.tokens_T), _long(batch.positions_T)


def _distribution(batch: Batch) -> Distribution:
    return Distribution(batch.temperature, batch.top_p, batch.top_k)


def _term_of(loss: LossSpec, batch: Batch, sequence: SequenceRatio | None) -> TermOf:
    weights = _float(batch.weights_N)
    old, ref, kl_weights = map(_optional, (batch.old_logprobs_N, batch.ref_logprobs_N, batch.kl_weights_N))

    def term_of(logprobs: Tensor, rows: slice) -> TargetLoss:
        return target_loss(
            loss,
            logprobs,
            None if old is None else old[rows],
            weights[rows],
            sequence=None if sequence is None else SequenceRatio(*(column[rows] for column in sequence)),
            ref_logprobs_N=None if ref is None else ref[rows],
            kl_weights_N=None if kl_weights is None else kl_weights[rows],
        )

    return term_of


def _report(
    batch: Batch,
    results: Sequence[tuple[Part, HeadResult]],
    loss: float,
    norm: float,
    learning_rate: float,
    applied: bool,
    start: float,
) -> StepReport:
    logprobs = torch.cat([result.logprobs_N for _, result in results]).double()
    entropy = torch.cat([result.entropy_N for _, result in results]).double()
    sampler = torch.cat([_float(part.batch.sampler_logprobs_N) for part, _ in results]).double()
    gap = logprobs - sampler
    return StepReport(
        loss=float(loss),
        grad_norm=norm,
        learning_rate=learning_rate,
        logprob_mean=logprobs.mean().item(),
        entropy_mean=entropy.mean().item(),
        clip_fraction=sum(result.clipped for _, result in results) / batch.target_count,
        mismatch_mean=gap.abs().mean().item(),
        mismatch_max=gap.abs().max().item(),
        mismatch_kl=(gap.exp() - 1 - gap).mean().item(),
        tokens=batch.token_count,
        targets=batch.target_count,
        seconds=time.perf_counter() - start,
        applied=applied,
        kl_mean=_kl_mean(results),
    )


def _kl_mean(results: Sequence[tuple[Part, HeadResult]]) -> float:
    """Over all targets; 0 without a reference."""
    total = count = 0.0
    for part, result in results:
        if part.batch.ref_logprobs_N is not None:
            difference = result.logprobs_N.double() - _float(part.batch.ref_logprobs_N).double()
            total += kl_estimate("k3", difference).sum().item()
            count += len(difference)
    return total / count if count else 0.0
