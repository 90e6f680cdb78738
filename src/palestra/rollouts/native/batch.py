"""The decode loop's state: rows that wait, rows that run, and one step over them all.

Single-threaded and free of clocks: what happens depends only on the order in
which rows are submitted, cancelled and weights installed. Rows are admitted first
come, first served into free slots; running row i owns cache slot i. A finished or
cancelled row leaves before the next step, and the last row takes its slot. Rows
with the same prompt share one prefill as long as the weights that computed it
still serve: across a new version nothing is shared.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from palestra.errors import EngineError
from palestra.rollouts.native import forward
from palestra.rollouts.native.cache import KVCache
from palestra.rollouts.native.layers import Model
from palestra.rollouts.native.sampler import logprobs_of, sample, uniform
from palestra.rollouts.native.stop import StopChecker
from palestra.rollouts.native.weights import Weights
from palestra.types import Completion, SamplingParams, StopReason, Version

PREFILL_TOKENS = 2048
"""Prompt tokens that go through the model at once; a longer prompt goes alone."""
SCORE_ROWS = 256
"""Logits rows that are alive at once while scoring."""


@dataclass(slots=True, eq=False)
class Row:
    """One request on its way: what was asked, what was sampled, how it ended."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    stop: StopChecker
    room: int
    """Tokens the context leaves after the prompt."""
    name: str = ""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    outcome: Completion | EngineError | None = None
    prompt_logits_V: Tensor | None = None
    """The serving version's logits after the prompt: a later row with this prompt starts from them."""

    @property
    def stored(self) -> int:
        """Positions in the cache: the prompt and all sampled tokens but the last."""
        return len(self.prompt) + max(0, len(self.tokens) - 1)

    def accept(self, token: int, logprob: float, version: Version) -> None:
        """Take one sampled token; sets ``outcome`` if the row ends with it."""
        if not math.isfinite(logprob):
            self.outcome = EngineError(
                f"the model's logits are not finite under {version}",
                where=self._where(),
                expected="finite weights: the training step before this version may have diverged",
            )
            return
        self.tokens.append(token)
        self.logprobs.append(min(logprob, 0.0))
        self.versions.append(version.number)
        reason = self.stop.check(token)
        if reason is not None:
            self.outcome = self._completion(reason)

    def _completion(self, reason: StopReason) -> Completion:
        return Completion(tuple(self.tokens), tuple(self.logprobs), tuple(self.versions), reason)

    def _where(self) -> str:
        name = f"request {self.name}, " if self.name else ""
        return f"{name}token {len(self.tokens)} after a prompt of {len(self.prompt)}"


class DecodeBatch:
    """Rows in, finished rows out, one ``step`` at a time."""

    def __init__(self, model: Model, *, max_running: int, context: int) -> None:
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self._model = model
        self._max_running = max_running
        slots = model.ops.padded(max_running)
        self.cache = KVCache(model.config, slots=slots, context=context, dtype=model.ops.dtype)
        self._weights: Weights | None = None
        self._version: Version | None = None

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def install(self, weights: Weights, version: Version) -> None:
        """Serve ``weights`` from the next step on; running rows keep their cache, but share it no more."""
        self._weights, self._version = weights, version
        for row in self.running:
            row.prompt_logits_V = None

    def submit(self, rows: Sequence[Row]) -> None:
        self.waiting.extend(rows)

    def cancel(self, row: Row) -> None:
        """Forget a row, wherever it is; a row that has ended is left alone."""
        if row in self.running:
            self._leave(self.running.index(row))
        elif row in self.waiting:
            self.waiting.remove(row)

    def rest(self) -> None:
        """Nothing to do for a while: give back the cache, which holds nothing where no row runs."""
        if not self.running:
            self.cache.release()

    def free(self) -> None:
        """Give back cache and weights; every row is gone."""
        self.waiting.clear()
        self.running.clear()
        self.cache.release()
        self._weights = None

    def step(self) -> list[Row]:
        """Admit what fits, sample one token for every running row, return the rows that ended."""
        ended = self._admit()
        if self.running:
            weights, version = self._serving()
            tokens = [row.tokens[-1] for row in self.running]
            logits_NV = forward.step(
                self._model, weights, self.cache, tokens, [row.stored for row in self.running]
            )
            ended += self._sample(self.running, logits_NV, version)
        return ended

    def score(self, token_ids: Sequence[int], sampling: SamplingParams) -> tuple[float, ...]:
        """Logprobs of ``token_ids[1:]``, as ``Engine.score`` defines them."""
        weights, _ = self._serving()
        if len(token_ids) < 2:
            return ()
        hidden_TH = forward.prompts(self._model, weights, [token_ids[:-1]])
        found: list[float] = []
        for start in range(0, hidden_TH.shape[0], SCORE_ROWS):
            targets = token_ids[start + 1 : start + 1 + SCORE_ROWS]
            logits_NV = forward.logits(self._model, weights, hidden_TH[start : start + SCORE_ROWS])
            found += logprobs_of(logits_NV, targets, sampling)
        return tuple(found)

    def _serving(self) -> tuple[Weights, Version]:
        if self._weights is None or self._version is None:
            raise EngineError(
                "the engine has no weights", next_command="await engine.start(manifest, tensors)"
            )
        return self._weights, self._version

    def _admit(self) -> list[Row]:
        """Move waiting rows into free slots, prefill their prompts and sample their first tokens."""
        first = len(self.running)
        while self.waiting and len(self.running) < self._max_running:
            self.running.append(self.waiting.popleft())
        fresh = self.running[first:]
        if not fresh:
            return []
        _, version = self._serving()
        self.cache.reserve(max(self._need(row) for row in fresh), first)
        owners = self._owners(first)
        self._prefill([slot for slot in range(first, len(self.running)) if owners[slot] == slot])
        for slot in range(first, len(self.running)):
            row, owner = self.running[slot], self.running[owners[slot]]
            row.prompt_logits_V = owner.prompt_logits_V
            if owner is not row:
                self.cache.copy(owners[slot], slot, len(row.prompt))
        logits_NV = torch.stack([row.prompt_logits_V for row in fresh if row.prompt_logits_V is not None])
        return self._sample(fresh, logits_NV, version)

    @staticmethod
    def _need(row: Row) -> int:
        """The positions the row may fill."""
        return len(row.prompt) + min(row.sampling.max_new_tokens, row.room)

    def _owners(self, first: int) -> dict[int, int]:
        """For each new slot, the slot whose prefill it uses: an earlier row's with its prompt, or its own."""
        by_prompt: dict[tuple[int, ...], int] = {}
        owners: dict[int, int] = {}
        for slot, row in enumerate(self.running):
            if slot >= first:
                owners[slot] = by_prompt.setdefault(row.prompt, slot)
            elif row.prompt_logits_V is not None:
                by_prompt.setdefault(row.prompt, slot)
        return owners

    def _prefill(self, slots: list[int]) -> None:
        """Compute the prompts of ``slots`` in portions, filling their cache and prompt logits."""
        weights, _ = self._serving()
        for portion in _portions([len(self.running[slot].prompt) for slot in slots], PREFILL_TOKENS):
            chosen = [slots[i] for i in portion]
            prompts = [self.running[slot].prompt for slot in chosen]
            hidden_TH = forward.prompts(self._model, weights, prompts, self.cache, chosen)
            ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
            logits_PV = forward.logits(self._model, weights, hidden_TH[ends])
            for slot, logits_V in zip(chosen, logits_PV, strict=True):
                self.running[slot].prompt_logits_V = logits_V
            self.prompt_tokens += hidden_TH.shape[0]

    def _sample(self, rows: Sequence[Row], logits_NV: Tensor, version: Version) -> list[Row]:
        """One token for each row; rows that end leave their slots and are returned in order."""
        uniforms = [uniform(row.sampling.seed, len(row.tokens)) for row in rows]
        tokens, logprobs = sample(logits_NV, [row.sampling for row in rows], uniforms)
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            row.accept(token, logprob, version)
            self.generated_tokens += row.outcome is None or isinstance(row.outcome, Completion)
        ended = [row for row in rows if row.outcome is not None]
        for slot in range(len(self.running) - 1, -1, -1):
            row = self.running[slot]
            if row.outcome is not None:
                if isinstance(row.outcome, EngineError):
                    self.cache.clear(slot)
                self._leave(slot)
        return ended

    def _leave(self, slot: int) -> None:
        """Free a slot; the last running row moves into it."""
        self.running[slot].prompt_logits_V = None
        last = self.running.pop()
        if slot < len(self.running):
            self.running[slot] = last
            self.cache.copy(len(self.running), slot, last.stored)


def _portions(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Indices in order, cut so that each portion's lengths sum to at most ``limit`` (or it is one)."""
    portions: list[list[int]] = []
    filled = limit
    for index, length in enumerate(lengths):
        if filled + length > limit:
            portions.append([])
            filled = 0
        portions[-1].append(index)
        filled += length
    return portions
