"""From hidden states to target logprobs, without ever holding [targets, vocabulary].

Targets go through in chunks. Because a loss term depends on one logprob only, a
chunk's gradient is taken while its probabilities are still there: nothing of
vocabulary width is saved or computed twice.

**The distribution** is the one the target was sampled from. Logits are divided
by the temperature, `palestra.algorithms.truncation` says which tokens top-k and
top-p keep, and what is kept is renormalised. A trained target always counts as
kept: it *was* sampled, and rounding at the edge must not make its logprob minus
infinity. Which tokens are kept is a constant to the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from palestra.algorithms.losses import TargetLoss
from palestra.algorithms.truncation import least_kept
from palestra.models.functions import add_product

_CHUNK_BYTES = 48 << 20
_MIN_ROWS, _MAX_ROWS = 32, 512

TermOf = Callable[[Tensor, slice], TargetLoss]
"""(logprobs of some targets, which targets) -> their loss terms."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """What turns logits into the distribution that was sampled from."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class HeadResult:
    logprobs_N: Tensor
    entropy_N: Tensor
    """Nats, of the distribution the target was sampled from."""
    loss: float
    """The sum of the terms."""
    clipped: int
    hidden_grad_NH: Tensor


class Head:
    """The vocabulary-wide matrix product and its buffers, which are allocated once."""

    def __init__(self, vocab_size: int) -> None:
        rows = _CHUNK_BYTES // (4 * vocab_size)
        self.chunk_rows = max(_MIN_ROWS, min(_MAX_ROWS, rows))
        self._vocab_size = vocab_size
        self._buffers = [torch.empty(0), torch.empty(0)]

    @torch.no_grad()
    def score(
        self, hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, distribution: Distribution
    ) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies [N] in fp32. Products run in the dtype of ``hidden_NH``."""
        weight, scaled = weight_VH.to(hidden_NH.dtype), _scaled(hidden_NH, distribution)
        chunks = self._chunks(scaled, weight, targets_N, distribution)
        logprobs, entropies = zip(*((chunk.logprobs, chunk.entropy) for _, chunk in chunks), strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    @torch.no_grad()
    def train(
        self,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        distribution: Distribution,
        term_of: TermOf,
        weight_grad_VH: Tensor | None,
    ) -> HeadResult:
        """`score` with the loss and its gradients; the weight's is added to ``weight_grad_VH``, if given."""
        weight, scaled = weight_VH.to(hidden_NH.dtype), _scaled(hidden_NH, distribution)
        logprobs, entropy = torch.empty(len(targets_N)), torch.empty(len(targets_N))
        hidden_grad = torch.empty_like(hidden_NH)
        loss, clipped = 0.0, 0
        for rows, chunk in self._chunks(scaled, weight, targets_N, distribution):
            logprobs[rows], entropy[rows] = chunk.logprobs, chunk.entropy
            terms, grad, clips = _gradient(term_of, chunk.logprobs, rows)
            loss += terms
            clipped += clips
            logits_grad = chunk.gradient(targets_N[rows], grad).to(hidden_NH.dtype)
            torch.mm(logits_grad.t(), weight, out=hidden_grad[rows])
            if weight_grad_VH is not None:
                add_product(weight_grad_VH, logits_grad, scaled[rows])
        if distribution.temperature != 1:
            hidden_grad /= distribution.temperature
        return HeadResult(logprobs, entropy, loss, clipped, hidden_grad)

    def _chunks(
        self, scaled: Tensor, weight: Tensor, targets_N: Tensor, distribution: Distribution
    ) -> Iterator[tuple[slice, _Chunk]]:
        """Which targets, and their distributions; the next chunk overwrites the last one's weights."""
        for start in range(0, len(targets_N), self.chunk_rows):
            rows = slice(start, min(start + self.chunk_rows, len(targets_N)))
            yield rows, self._normalise(scaled[rows], weight, targets_N[rows], distribution)

    def _normalise(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, distribution: Distribution
    ) -> _Chunk:
        # Vocabulary first: the product then streams the big matrix once and is twice as fast on a CPU.
        shape = (self._vocab_size, len(targets))
        logits, weights = self._buffer(0, shape), self._buffer(1, shape)
        if hidden.dtype == torch.float32:
            torch.mm(weight, hidden.t(), out=logits)
        else:
            logits.copy_(weight @ hidden.t())
        kept = kept_tokens(logits, targets, distribution)
        if kept is not None:
            logits.masked_fill_(~kept, -torch.inf)
        logits -= logits.amax(0)
        own = logits.gather(0, targets[None])[0]
        torch.exp(logits, out=weights)
        total = weights.sum(0)
        log_total = total.log()
        if kept is not None:
            logits.masked_fill_(~kept, 0)  # exp(-inf) * -inf is nan, and the term's limit is 0
        entropy = log_total - logits.mul_(weights).sum(0) / total
        return _Chunk(own - log_total, entropy, weights, total)

    def _buffer(self, which: int, shape: tuple[int, int]) -> Tensor:
        size = shape[0] * shape[1]
        if self._buffers[which].numel() < size:
            self._buffers[which] = torch.empty(size)
        return self._buffers[which][:size].view(shape)


@dataclass(slots=True)
class _Chunk:
    """Some targets' distributions: ``weights_Vn / total_n``."""

    logprobs: Tensor
    entropy: Tensor
    weights_Vn: Tensor
    total_n: Tensor

    def gradient(self, targets: Tensor, grad: Tensor) -> Tensor:
        """d loss / d logits [V, n], given d loss / d logprob; overwrites the weights."""
        self.weights_Vn.mul_(-grad / self.total_n)
        self.weights_Vn.scatter_add_(0, targets[None], grad[None])
        return self.weights_Vn


def _scaled(hidden_NH: Tensor, distribution: Distribution) -> Tensor:
    return hidden_NH if distribution.temperature == 1 else hidden_NH / distribution.temperature


def _gradient(term_of: TermOf, logprobs: Tensor, rows: slice) -> tuple[float, Tensor, int]:
    with torch.enable_grad():
        leaf = logprobs.detach().clone().requires_grad_()
        terms, clipped = term_of(leaf, rows)
        loss = terms.sum(dtype=torch.float64)
        (grad,) = torch.autograd.grad(loss, leaf)
    return loss.item(), grad, int(clipped.sum())


def kept_tokens(logits_Vn: Tensor, targets_n: Tensor, distribution: Distribution) -> Tensor | None:
    """[V, n], True where the distribution keeps a token; None where it keeps all. See the module's text."""
    vocab, count = logits_Vn.shape
    if not 0 < distribution.top_k < vocab and distribution.top_p >= 1:
        return None
    rows_nV = logits_Vn.t().contiguous()
    floor_n = least_kept(rows_nV, [distribution.top_k] * count, [distribution.top_p] * count)
    return (logits_Vn >= floor_n).scatter_(0, targets_n[None], True)
