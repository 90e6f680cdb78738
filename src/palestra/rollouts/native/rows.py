"""One request on its way through the decode batch: what was asked, what was sampled, how it ended.

A row ends exactly once, with a completion or an error; a token is taken only with a
finite logprob, tagged with the version that chose it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from palestra.errors import EngineError
from palestra.rollouts.base import GenerateRequest
from palestra.rollouts.native.cache import Pool
from palestra.rollouts.native.stop import StopChecker
from palestra.types import Completion, SamplingParams, StopReason, Version


@dataclass(slots=True, eq=False)
class Row:
    """A request and its state. Rows are told apart by identity."""

    request: GenerateRequest
    stop: StopChecker
    room: int
    """Tokens the context leaves after the prompt."""
    adapter: str = ""
    """Key of the adapter it began with."""
    never_first: frozenset[int] = frozenset()
    """Tokens that end a completion: not sampled before ``min_new_tokens``."""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    outcome: Completion | EngineError | None = None
    pool: Pool[Row] | None = None
    slot: int = -1
    filled: int = 0
    """Positions of the prompt that its slot holds."""
    resumed: bool = False
    """Whether it went on from positions that its session had left."""
    one_version: bool = True
    """Whether all its slot holds was computed under the weights that serve."""
    prompt_logits_V: Tensor | None = None
    """The serving version's logits after the prompt: a later row with this prompt starts from them."""

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.request.prompt_ids

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def session_key(self) -> tuple[str, str]:
        return self.request.session, self.adapter

    @property
    def need(self) -> int:
        """The positions it may fill."""
        return len(self.prompt) + min(self.sampling.max_new_tokens, self.room)

    @property
    def stored(self) -> int:
        """Positions in the cache: of the prompt, and all sampled tokens but the last."""
        return self.filled + max(0, len(self.tokens) - 1)

    def bias(self) -> dict[int, float]:
        """What to add to the next token's logits."""
        change = dict(self.request.logit_bias)
        if len(self.tokens) < self.request.min_new_tokens:
            change |= dict.fromkeys(self.never_first, -math.inf)
        return change

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
            self.outcome = self.completion(reason)

    def completion(self, reason: StopReason) -> Completion:
        return Completion(tuple(self.tokens), tuple(self.logprobs), tuple(self.versions), reason)

    def _where(self) -> str:
        name = f"request {self.request.id}, " if self.request.id else ""
        return f"{name}token {len(self.tokens)} after a prompt of {len(self.prompt)}"
