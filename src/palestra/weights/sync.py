"""Publish, stage, commit, prove: the only way weights reach an engine.

No version serves before it is proven twice over: the digest of the bytes the
engine received equals the published manifest's, and the engine's logprobs on
probe tokens equal the trainer's within the number type's rounding. A sync that
changed nothing raises unless it was asked for: a run whose updates never reach
the engine looks exactly like slow learning. Everything goes through the engine
and trainer ports; this module holds no tensor beyond one call.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from palestra.batches import Batch
from palestra.errors import WeightsError
from palestra.rollouts.base import Engine
from palestra.trainer.base import Trainer
from palestra.types import Manifest, SamplingParams, Version
from palestra.weights.manifests import full_manifest

TOLERANCES = {"fp32": (1e-3, 1e-3), "bf16": (0.06, 1.0)}
"""Allowed mean and largest |logprob difference| per probe token. Every bf16 engine measured
against transformers sits at a mean of 0.03-0.04; see docs/weights.md."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What one sync cost and proved."""

    version: Version
    nbytes: int
    changed_tensors: int
    publish_s: float
    stage_s: float
    commit_s: float
    prove_s: float
    probe_gap_mean: float
    probe_gap_max: float


def probe_batch(token_ids: tuple[int, ...]) -> Batch:
    """A batch whose targets are ``token_ids[1:]``, each given all tokens before it, at weight 0."""
    count = len(token_ids)
    zeros = [0.0] * (count - 1)
    return Batch(
        tokens_T=token_ids,  # type: ignore[arg-type]  # the constructor packs sequences
        positions_T=range(count),  # type: ignore[arg-type]
        segment_ids_T=[0] * count,  # type: ignore[arg-type]
        segment_parents_S=[-1],  # type: ignore[arg-type]
        predictors_N=range(count - 1),  # type: ignore[arg-type]
        targets_N=token_ids[1:],  # type: ignore[arg-type]
        weights_N=zeros,  # type: ignore[arg-type]
        sampler_logprobs_N=zeros,  # type: ignore[arg-type]
        sequence_ids_N=[0] * (count - 1),  # type: ignore[arg-type]
    )


class WeightSync:
    """Brings one engine to the trainer's weights, version by version.

    ``probe_ids`` are at least two token ids; ``dtype`` names the row of TOLERANCES.
    """

    def __init__(self, trainer: Trainer, engine: Engine, probe_ids: tuple[int, ...], dtype: str) -> None:
        if len(probe_ids) < 2:
            raise ValueError("a probe needs at least two tokens")
        self._trainer = trainer
        self._engine = engine
        self._probe_ids = probe_ids
        self._probe = probe_batch(probe_ids)
        self._tolerance = TOLERANCES[dtype]
        self._served: Manifest | None = None

    @property
    def served(self) -> Manifest | None:
        """The manifest of the last proven version."""
        return self._served

    async def serve(self, version: Version, *, allow_unchanged: bool = False) -> SyncReport:
        """Make ``version`` (the trainer's present weights) the one the engine serves.

        Raises WeightsError if nothing changed since the last version, if the engine
        received other bytes, or if its logprobs are not the trainer's. After a raise
        from proving, the engine must not serve.
        """
        started = time.perf_counter()
        manifest = await asyncio.to_thread(lambda: full_manifest(version, self._trainer.export()))
        changed = self._check_changed(manifest, allow_unchanged)
        published = time.perf_counter()
        fresh = self._engine.version is None
        take = self._engine.start if fresh else self._engine.stage
        received = await take(manifest, self._trainer.export())
        if received != manifest.digest:
            raise WeightsError(
                f"the engine received other bytes than version {version} holds",
                expected=f"digest {manifest.digest}",
                where=f"received {received}",
                next_command="the same command again; if it repeats, the transport corrupts data",
            )
        staged = time.perf_counter()
        if not fresh:
            await self._engine.commit(version)
        committed = time.perf_counter()
        gap_mean, gap_max = await self._prove(version)
        self._served = manifest
        return SyncReport(
            version=version,
            nbytes=manifest.nbytes,
            changed_tensors=changed,
            publish_s=published - started,
            stage_s=staged - published,
            commit_s=committed - staged,
            prove_s=time.perf_counter() - committed,
            probe_gap_mean=gap_mean,
            probe_gap_max=gap_max,
        )

    def _check_changed(self, manifest: Manifest, allow_unchanged: bool) -> int:
        if self._served is None:
            return len(manifest.tensors)
        before = {entry.name: entry.digest for entry in self._served.tensors}
        changed = sum(before.get(entry.name) != entry.digest for entry in manifest.tensors)
        if not changed and not allow_unchanged:
            raise WeightsError(
                f"version {manifest.version} changed no weight since {self._served.version}: "
                "the update never reached what is exported",
                expected="at least one changed tensor after an applied update",
                next_command="check optimizer.learning_rate and trainer.dtype (palestra config show)",
            )
        return changed

    async def _prove(self, version: Version) -> tuple[float, float]:
        """Mean and largest |engine - trainer| logprob over the probe tokens."""
        if self._engine.version != version:
            raise WeightsError(f"the engine serves {self._engine.version} after a sync of {version}")
        theirs = await self._engine.score(self._probe_ids, SamplingParams())
        ours = await asyncio.to_thread(self._trainer.logprobs, self._probe)
        gaps = [abs(a - b) for a, b in zip(theirs, ours, strict=True)]
        mean, largest = sum(gaps) / len(gaps), max(gaps)
        if not (mean <= self._tolerance[0] and largest <= self._tolerance[1]):
            raise WeightsError(
                f"version {version} is not what the engine computes with: probe logprobs differ by "
                f"{mean:.2g} on average and {largest:.2g} at most",
                expected=f"at most {self._tolerance[0]} and {self._tolerance[1]}",
                next_command="palestra doctor",
            )
        return mean, largest
