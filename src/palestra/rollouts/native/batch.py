"""The decode loop's state: rows that wait, rows whose prompt is computed, rows that decode, and one step.

Single-threaded and free of clocks: what happens depends only on the order in which
rows are submitted, cancelled and weights installed. Rows are admitted first come,
first served, once the cache has a slot for all they may need. Prompts are computed
in pieces cut at fixed positions, few at a time while others decode, so a long
prompt never stops them and changes no number. Rows with the same prompt share one
prefill as long as the weights that computed it still serve: across a new version
nothing is shared, and a prompt half computed begins anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from palestra.errors import EngineError
from palestra.rollouts.base import VersionNotReady
from palestra.rollouts.native import forward
from palestra.rollouts.native.adapters import Adapter, RowAdapters
from palestra.rollouts.native.cache import KVCache, Pool
from palestra.rollouts.native.layers import Model
from palestra.rollouts.native.prefixes import Prefix, PrefixStore
from palestra.rollouts.native.rows import Row
from palestra.rollouts.native.sampler import logprobs_of, sample, uniform
from palestra.rollouts.native.weights import Weights
from palestra.types import Completion, SamplingParams, StopReason, Version

PIECE = 128
"""Prompts are cut at multiples of this position; one piece at least is computed each step."""
PREFILL_TOKENS = 2048
"""Prompt tokens computed in one step while nothing decodes."""
SCORE_ROWS = 256
"""Logits rows that are alive at once while scoring."""


class DecodeBatch:
    """Rows in, ended rows out, one ``step`` at a time."""

    def __init__(
        self, model: Model, *, max_running: int, context: int, budget: int, prefix_budget: int = 0
    ) -> None:
        """``budget`` is in positions of the cache; sessions may keep ``prefix_budget`` of them."""
        self.prompt_tokens = 0
        self.reused_tokens = 0
        self.generated_tokens = 0
        self.admitting = True
        self.adapters: dict[str, Adapter] = {}
        """By key: a name and the count of loads, so that rows keep the one they began with."""
        device = model.cos_P1D.device
        self.cache: KVCache[Row] = KVCache(
            model.config,
            context=context,
            budget=budget,
            dtype=model.ops.dtype,
            device=device,
            reads_beyond=model.kernels is None,
        )
        self.prefixes = PrefixStore(prefix_budget)
        self._model = model
        self._max_running = max_running
        self._waiting: dict[Row, None] = {}
        self._filling: dict[Row, None] = {}
        self._ended: list[Row] = []
        self._weights: Weights | None = None
        self._version: Version | None = None

    @property
    def waiting(self) -> list[Row]:
        return list(self._waiting)

    @property
    def running(self) -> list[Row]:
        """Every row that has a slot, pool by pool."""
        return [row for pool in self.cache.pools.values() for row in pool.owners]

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return bool(self._ended or self.running or (self._waiting and self.admitting))

    def install(self, weights: Weights, version: Version) -> None:
        """Serve ``weights`` from the next step on; decoding rows keep their cache, but share it no more."""
        self._weights, self._version = weights, version
        self.prefixes.clear()
        for row in self.running:
            row.prompt_logits_V = None
            row.one_version = False
        for row in self._filling:
            row.filled = 0
            row.one_version = True
            row.resumed = False
        for row in [*self._waiting, *self.running]:
            if row.request.exact_version not in (None, version.number):
                row.outcome = VersionNotReady(
                    f"the engine serves {version} now", expected=f"version {row.request.exact_version}"
                )
                self._end(row)

    def submit(self, rows: Sequence[Row]) -> None:
        self._waiting.update(dict.fromkeys(rows))

    def cancel(self, row: Row) -> None:
        """Forget a row, wherever it is; a row that has ended is left alone."""
        if row.pool is not None:
            self._leave(row)
        self._waiting.pop(row, None)
        if row in self._ended:
            self._ended.remove(row)

    def abort(self, *, waiting: bool) -> None:
        """End running rows, and waiting ones if asked, with the tokens they have."""
        for row in [*self.running, *(self._waiting if waiting else ())]:
            row.outcome = row.completion(StopReason.ABORTED)
            self._end(row)

    def rest(self) -> None:
        """Nothing to do for a while: give back the cache, which holds nothing where no row runs."""
        self.cache.release()

    def free(self) -> None:
        """Give back cache, adapters and weights; every row is gone."""
        self._waiting.clear()
        self._filling.clear()
        self._ended.clear()
        self.cache.pools.clear()
        self.prefixes.clear()
        self.adapters.clear()
        self._weights = None

    def forget_adapter(self, key: str) -> None:
        """Let an adapter go, now or when the last row that uses it has ended."""
        users = (*self.running, *self._waiting)
        if all(row.adapter != key for row in users):
            self.adapters.pop(key, None)

    def step(self) -> list[Row]:
        """Admit what fits, go on with prompts, sample a token for every decoding row; the rows that ended."""
        self._admit()
        self._fill()
        lanes = [
            forward.Lane(pool, [r.tokens[-1] for r in rows], [r.stored for r in rows])
            for pool in self.cache.pools.values()
            if (rows := pool.owners[: pool.decoding])
        ]
        if lanes:
            weights, _ = self._serving()
            rows = self._decoding()
            logits_NV = forward.step(self._model, weights, lanes, self._adapters_of(rows))
            self._sample(rows, logits_NV)
        return self.take_ended()

    def take_ended(self) -> list[Row]:
        """The rows that have ended since this was last asked, in order."""
        ended, self._ended = self._ended, []
        return ended

    def score(self, token_ids: Sequence[int], sampling: SamplingParams) -> tuple[float, ...]:
        """Logprobs of ``token_ids[1:]``, as ``Engine.score`` defines them."""
        weights, _ = self._serving()
        if len(token_ids) < 2:
            return ()
        hidden_TH = forward.whole(self._model, weights, token_ids[:-1])
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

    def _decoding(self) -> list[Row]:
        return [row for pool in self.cache.pools.values() for row in pool.owners[: pool.decoding]]

    def _adapters_of(self, rows: Sequence[Row]) -> RowAdapters | None:
        return RowAdapters.build([row.adapter for row in rows], self.adapters)

    # -- prompts

    def _admit(self) -> None:
        """Give waiting rows their slots, in order, as long as there are slots."""
        free = self._max_running - len(self.running)
        while self.admitting and self._waiting and free > 0:
            row = next(iter(self._waiting))
            pool = self.cache.place(row.need, self.prefixes.held)
            if pool is None and self.prefixes.held:
                self.prefixes.shrink(self.prefixes.held - self.cache.capacity(row.need))
                pool = self.cache.place(row.need, self.prefixes.held)
            if pool is None:
                return
            del self._waiting[row]
            pool.enter(row)
            row.pool = pool
            self._filling[row] = None
            self._resume_session(row, pool)
            free -= 1

    def _resume_session(self, row: Row, pool: Pool[Row]) -> None:
        found = self.prefixes.find(row.session_key, row.prompt) if row.session_key[0] else None
        if found is not None:
            prefix, row.filled = found
            pool.paste(row.slot, prefix.cache_2LKTD, row.filled)
            row.resumed = True
            self.reused_tokens += row.filled

    def _fill(self) -> None:
        """Go on computing prompts; rows whose prompt is complete sample their first token."""
        leaders = self._leaders()
        pieces, ends = self._pieces([row for row in self._filling if leaders[row] is row])
        if pieces:
            weights, _ = self._serving()
            rows = [row for row, piece in pieces for _ in piece.tokens]
            hidden_TH = forward.prefill(
                self._model, weights, [piece for _, piece in pieces], self._adapters_of(rows)
            )
            self.prompt_tokens += hidden_TH.shape[0]
            if ends:
                last_P = torch.tensor(list(ends.values()), device=hidden_TH.device)
                logits_PV = forward.logits(self._model, weights, hidden_TH[last_P])
                for row, logits_V in zip(ends, logits_PV, strict=True):
                    row.prompt_logits_V = logits_V
        ready = [row for row in self._filling if leaders[row].prompt_logits_V is not None]
        for row in ready:
            self._promote(row, leaders[row])
        if ready:
            logits_NV = torch.stack([r.prompt_logits_V for r in ready if r.prompt_logits_V is not None])
            self._sample(ready, logits_NV)

    def _leaders(self) -> dict[Row, Row]:
        """For each row in prefill, the row that computes its prompt: an earlier one with it, or itself.

        What went on from a session's own positions stays within that session.
        """
        first: dict[tuple[str, str, tuple[int, ...]], Row] = {}
        for row in self._decoding():
            if row.prompt_logits_V is not None:
                first.setdefault(_sharing_key(row), row)
        return {row: first.setdefault(_sharing_key(row), row) for row in self._filling}

    def _pieces(self, rows: Sequence[Row]) -> tuple[list[tuple[Row, forward.Piece]], dict[Row, int]]:
        """What to compute now, and for the prompts that this completes, the index of their last token."""
        left = PIECE if any(pool.decoding for pool in self.cache.pools.values()) else PREFILL_TOKENS
        pieces: list[tuple[Row, forward.Piece]] = []
        ends: dict[Row, int] = {}
        done = 0
        for row in rows:
            while row.filled < len(row.prompt) and row.pool is not None:
                stop = min(len(row.prompt), (row.filled // PIECE + 1) * PIECE)
                tokens = row.prompt[row.filled : stop]
                if pieces and len(tokens) > left:
                    return pieces, ends
                pieces.append((row, forward.Piece(tokens, row.filled, row.pool, row.slot)))
                row.filled = stop
                left -= len(tokens)
                done += len(tokens)
            ends[row] = done - 1
        return pieces, ends

    def _promote(self, row: Row, leader: Row) -> None:
        """The prompt is complete, in ``leader``'s slot: let ``row`` decode."""
        if row.pool is None or leader.pool is None:
            raise EngineError("a row in prefill has no slot")
        if leader is not row:
            row.pool.fill_from(leader.pool, leader.slot, row.slot, len(row.prompt))
            row.filled = len(row.prompt)
            row.prompt_logits_V = leader.prompt_logits_V
        del self._filling[row]
        row.pool.promote(row)

    # -- tokens

    def _sample(self, rows: Sequence[Row], logits_NV: Tensor) -> None:
        """One token for each row; rows that end leave their slots."""
        _, version = self._serving()
        logits_NV = _biased(logits_NV, rows)
        uniforms = [uniform(row.sampling.seed, len(row.tokens)) for row in rows]
        tokens, logprobs = sample(logits_NV, [row.sampling for row in rows], uniforms)
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            row.accept(token, logprob, version)
            self.generated_tokens += row.outcome is None or isinstance(row.outcome, Completion)
        for row in rows:
            if row.outcome is not None:
                self._end(row)

    def _end(self, row: Row) -> None:
        """``row`` has its outcome: it leaves, and its session keeps what may be computed upon."""
        if row.pool is not None:
            kept = isinstance(row.outcome, Completion) and row.session_key[0] and row.tokens
            if kept and row.one_version:
                self._keep(row, row.pool)
            self._leave(row)
        self._waiting.pop(row, None)
        self._ended.append(row)

    def _keep(self, row: Row, pool: Pool[Row]) -> None:
        if row.stored <= self.prefixes.budget:
            tokens = (*row.prompt, *row.tokens[:-1])
            self.prefixes.keep(row.session_key, Prefix(tokens, pool.copied(row.slot, row.stored)))
            self.prefixes.shrink(self.cache.budget - self.cache.reserved)

    def _leave(self, row: Row) -> None:
        if row.pool is not None:
            row.pool.leave(row)
        row.pool = None
        row.prompt_logits_V = None
        self._filling.pop(row, None)


def _sharing_key(row: Row) -> tuple[str, str, tuple[int, ...]]:
    return row.adapter, row.request.session if row.resumed else "", row.prompt


def _biased(logits_NV: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits with each row's bias; a new tensor where any row has one."""
    changes = {index: change for index, row in enumerate(rows) if (change := row.bias())}
    if not changes:
        return logits_NV
    biased_NV = logits_NV.float().clone()
    for index, change in changes.items():
        ids = torch.tensor(list(change), device=biased_NV.device)
        biased_NV[index, ids] += torch.tensor(list(change.values()), device=biased_NV.device)
    return biased_NV
