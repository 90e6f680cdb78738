"""The trainer on plain torch, one process, one device: fp32 masters, AdamW, packed forests.

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
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from palestra.algorithms.losses import SequenceRatio, TargetLoss, kl_estimate, sequence_ratio, target_loss
from palestra.algorithms.packing import Part, partition
from palestra.batches import Batch, LossSpec
from palestra.errors import TrainerError, boundary
from palestra.models.dtypes import TORCH_DTYPES
from palestra.models.folder import copy_model_files
from palestra.models.functions import gradient_of
from palestra.models.tensors import save_tensors, tensor_digest
from palestra.trainer.adamw import AdamW
from palestra.trainer.base import StepReport
from palestra.trainer.head import Distribution, Head, HeadResult, TermOf
from palestra.trainer.low_rank import LowRankModules
from palestra.trainer.memory import keep_freed_memory
from palestra.trainer.network import Network, load_network
from palestra.trainer.reference import Reference
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.skipped import save_batch
from palestra.trainer.state_files import INDEX, check_file, read_index, read_into, write_state
from palestra.trainer.tree_attention import TreeAttention
from palestra.types import Boundary

MASTERS = "masters"
REFERENCE = "reference"
ADAPTER = "adapter"
"""Where a saved model keeps the adapter that was merged into it."""


class TorchTrainer:
    """Implements `palestra.trainer.base.Trainer`."""

    def __init__(self, folder: Path, settings: TrainerSettings, network: Network | None = None) -> None:
        """Load ``folder``'s weights; ModelSourceError if they are missing, damaged or of another shape.

        ``network`` is what computes them, if not the fastest that can.
        """
        keep_freed_memory()
        self.settings = settings
        self.folder = folder
        self._network = network or load_network(folder, settings)
        self._masters = self._network.masters
        self._reference = Reference(self._network, settings.reference_decay, self._start)
        self._head = Head(self._network.vocab_size)
        self._base_digest = ""
        self.skipped_folder: Path | None = None
        """Where the batches of skipped updates are written; None keeps none."""
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
                    self._reference.follow()
            finally:
                optimizer.free_gradients()
            kept = ""
            if not applied and self.skipped_folder is not None:
                kept = str(save_batch(self.skipped_folder, self.updates, batch, loss, total, norm))
            report = _report(batch, results, total, norm, learning_rate, applied, start)
            return replace(report, batch_file=kept)

    def logprobs(self, batch: Batch) -> tuple[float, ...]:
        self._check(batch)
        with boundary(Boundary.TRAINER, "computing logprobs"), self._threads(), torch.no_grad():
            found = torch.empty(batch.target_count)
            for part in _with_targets(batch, self.settings):
                hidden = self._hidden(part.batch)
                rows = self._long(part.batch.predictors_N)
                logprobs, _ = self._head.score(
                    hidden.index_select(0, rows),
                    self._network.head_weight,
                    self._long(part.batch.targets_N),
                    _distribution(batch),
                )
                found[self._long(part.target_rows)] = logprobs
            return tuple(found.tolist())

    def reference_logprobs(self, batch: Batch) -> tuple[float, ...]:
        """`logprobs` under the starting model, or under the running mean where one is kept."""
        self._check(batch)
        with boundary(Boundary.TRAINER, "computing reference logprobs"), self._reference.active():
            return self.logprobs(batch)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        self._check_open()
        dtype = TORCH_DTYPES[self.settings.rollout_dtype]
        weights = self._network.weights()  # a close while the exporter is iterated must not break it
        return ((name, tensor.detach().to("cpu", dtype)) for name, tensor in weights)

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
            state = self._state()
            for part in state:
                name = f"{part}.safetensors"
                check_file(folder / name, index.files.get(name), shapes)
            for part, tensors in state.items():
                read_into(folder / f"{part}.safetensors", tensors)
            self._prepare().updates = index.updates

    def save_model(self, folder: Path) -> None:
        self._check_open()
        with boundary(Boundary.TRAINER, f"saving the model to {folder}"):
            copy_model_files(self.folder, folder)
            kinds, low_rank = self._network.source_dtypes, self._network.low_rank
            if low_rank is None:
                tensors = dict(self._network.weights())
            else:  # changed weights are new memory: as little of it as the files need
                tensors = {n: t.to(kinds.get(n, t.dtype)) for n, t in self._network.weights()}
                low_rank.save(folder / ADAPTER)
            save_tensors(folder, tensors, kinds)

    def export_adapter(self, folder: Path) -> None:
        """Write the adapter alone, as PEFT lays it out; TrainerError where every weight is trained."""
        low_rank = self._low_rank()
        with boundary(Boundary.TRAINER, f"saving the adapter to {folder}"):
            low_rank.save(folder)

    def load_adapter(self, folder: Path) -> None:
        """Go on from a saved adapter; an error, and nothing changed, if it is damaged or another."""
        self._low_rank().load(folder)

    def close(self) -> None:
        """Free the weights and the optimiser state; every other method then raises TrainerError."""
        if self._closed:
            return
        self._closed = True
        self._optimizer = None
        self._masters.clear()
        del self._network, self._head, self._reference

    def _hidden(self, batch: Batch) -> Tensor:
        columns = self._long(batch.tokens_T), self._long(batch.positions_T)
        again = torch.is_grad_enabled() and self.settings.recomputes(batch.token_count)
        return self._network.hidden(*columns, TreeAttention(batch), again)

    def _backward(self, batch: Batch, loss: LossSpec) -> HeadResult:
        """Add this micro-batch's gradient to the masters'."""
        hidden = self._hidden(batch)
        predictors = self._long(batch.predictors_N)
        head_weight = self._network.head_weight
        hidden_NH = hidden.detach().index_select(0, predictors)
        result = self._head.train(
            hidden_NH,
            head_weight.detach(),
            self._long(batch.targets_N),
            _distribution(batch),
            self._term_of(loss, batch, self._sequence_ratio(loss, batch, hidden_NH)),
            gradient_of(head_weight) if head_weight.requires_grad else None,
        )
        hidden.backward(torch.zeros_like(hidden).index_add_(0, predictors, result.hidden_grad_NH))
        return result

    def _sequence_ratio(self, loss: LossSpec, batch: Batch, hidden_NH: Tensor) -> SequenceRatio | None:
        """Needs all logprobs of a sequence before its first term; a sequence lies in one micro-batch."""
        log_ratio_N = None
        if loss.ratio != "token" and batch.old_logprobs_N is not None:
            logprobs_N, _ = self._head.score(
                hidden_NH, self._network.head_weight, self._long(batch.targets_N), _distribution(batch)
            )
            log_ratio_N = logprobs_N - self._float(batch.old_logprobs_N)
        return sequence_ratio(loss.ratio, self._long(batch.sequence_ids_N), log_ratio_N)

    def _term_of(self, loss: LossSpec, batch: Batch, sequence: SequenceRatio | None) -> TermOf:
        weights = self._float(batch.weights_N)
        columns = (batch.old_logprobs_N, batch.ref_logprobs_N, batch.kl_weights_N)
        old, ref, kl_weights = (None if c is None else self._float(c) for c in columns)

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

    def _prepare(self) -> AdamW:
        """The optimiser, whose moments are allocated at first use and then kept."""
        if self._optimizer is None:
            self._optimizer = AdamW(self._masters, self.settings)
            self._reference.mean()  # it begins where the masters begin
        return self._optimizer

    def _state(self) -> dict[str, Mapping[str, Tensor]]:
        mean = self._reference.mean()
        return {MASTERS: self._masters, **self._prepare().moments, **({REFERENCE: mean} if mean else {})}

    def _start(self) -> Mapping[str, Tensor]:
        """The masters that the run began with."""
        return load_network(self.folder, self.settings).masters

    def _low_rank(self) -> LowRankModules:
        self._check_open()
        if self._network.low_rank is None:
            raise TrainerError(
                "every weight is trained: there is no adapter", expected="trainer.lora_rank > 0"
            )
        return self._network.low_rank

    def _fingerprint(self) -> dict[str, Any]:
        shapes = [[name, list(master.shape)] for name, master in self._masters.items()]
        model = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
        if self._network.low_rank is not None and not self._base_digest:
            # A state of adapters alone belongs to the weights beside them.
            base = [tensor_digest(tensor) for tensor in self._network.frozen()]
            self._base_digest = hashlib.sha256(json.dumps(base).encode()).hexdigest()
        own = {"base": self._base_digest} if self._base_digest else {}
        return {"model": model, **own, **self.settings.fingerprint()}

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
            if not 0 <= worst < self._network.vocab_size:
                raise TrainerError(
                    f"{what} holds the token {worst}, which is outside the vocabulary",
                    expected=f"0 to {self._network.vocab_size - 1}",
                )

    @contextmanager
    def _threads(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(self._thread_count)
        elsewhere = nullcontext() if self.settings.device == "cpu" else torch.device(self.settings.device)
        try:
            with elsewhere:  # index tensors, buffers and moments are made where the weights lie
                yield
        finally:
            torch.set_num_threads(before)

    def _long(self, column: array[int]) -> Tensor:
        return torch.frombuffer(column, dtype=torch.int64).to(self.settings.device)

    def _float(self, column: array[float]) -> Tensor:
        return _float(column).to(self.settings.device)


def _with_targets(batch: Batch, settings: TrainerSettings) -> list[Part]:
    return [p for p in partition(batch, settings.micro_batch_tokens) if p.batch.target_count]


def _float(column: array[float]) -> Tensor:
    return torch.frombuffer(column, dtype=torch.float32)


def _distribution(batch: Batch) -> Distribution:
    return Distribution(batch.temperature, batch.top_p, batch.top_k)


def _report(
    batch: Batch,
    results: Sequence[tuple[Part, HeadResult]],
    loss: float,
    norm: float,
    learning_rate: float,
    applied: bool,
    start: float,
) -> StepReport:
    logprobs = torch.cat([result.logprobs_N for _, result in results]).cpu().double()
    entropy = torch.cat([result.entropy_N for _, result in results]).cpu().double()
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
            difference = result.logprobs_N.cpu().double() - _float(part.batch.ref_logprobs_N).double()
            total += kl_estimate("k3", difference).sum().item()
            count += len(difference)
    return total / count if count else 0.0
