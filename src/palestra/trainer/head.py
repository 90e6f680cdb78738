"""From hidden states to target logprobs, without ever holding [targets, vocabulary].

Targets go through in chunks. Because a loss term depends on one logprob only, a
chunk's gradient is taken while its probabilities are still there: nothing of
vocabulary width is saved or computed twice.

**The distribution** (the sampler's, and the same one in every engine). Logits are
divided by the temperature. ``top_k`` > 0 keeps every token whose logit is at
least the k-th largest (ties at the k-th are all kept). ``top_p`` < 1 then looks
at the distribution renormalised over what top-k kept, and keeps the smallest set
of most probable tokens whose probabilities sum to at least ``top_p``: the token
that crosses it is kept, and so are its exact ties. What is kept is renormalised.
A trained target always counts as kept: it *was* sampled, and rounding at the
edge must not make its logprob minus infinity. Which tokens are kept is a
constant to the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from palestra.algorithms.losses import TargetLoss

_CHUNK_BYTES = 48 << 20
_MIN_ROWS, _MAX_ROWS = 32, 512
_CANDIDATES = 1024

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
    loss: float = 0.0
    """The sum of the terms; 0 where no term was asked for."""
    clipped: int = 0
    hidden_grad_NH: Tensor | None = None


class Head:
    """The vocabulary-wide matrix product and its buffers, which are allocated once."""

    def __init__(self, vocab_size: int) -> None:
        rows = _CHUNK_BYTES // (4 * vocab_size)
        self.chunk_rows = max(_MIN_ROWS, min(_MAX_ROWS, rows))
        self._vocab_size = vocab_size
        self._buffers = [torch.empty(0), torch.empty(0)]

    @torch.no_grad()
    def __call__(
        self,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        distribution: Distribution,
        term_of: TermOf | None = None,
        weight_grad_VH: Tensor | None = None,
    ) -> HeadResult:
        """Logprobs and entropies in fp32; with ``term_of`` also the loss and its gradients.

        ``hidden_grad_NH`` is the loss's gradient; the weight's is added to
        ``weight_grad_VH``. Products run in the dtype of ``hidden_NH``.
        """
        scaled = hidden_NH if distribution.temperature == 1 else hidden_NH / distribution.temperature
        weight = weight_VH.to(hidden_NH.dtype)
        count = len(targets_N)
        logprobs, entropy = torch.empty(count), torch.empty(count)
        hidden_grad = torch.empty_like(hidden_NH) if term_of else None
        losses: list[float] = []
        clipped = 0
        for start in range(0, count, self.chunk_rows):
            rows = slice(start, min(start + self.chunk_rows, count))
            targets = targets_N[rows]
            chunk = self._normalise(scaled[rows], weight, targets, distribution)
            logprobs[rows], entropy[rows] = chunk.logprobs, chunk.entropy
            if term_of and hidden_grad is not None and weight_grad_VH is not None:
                loss, grad, clips = _gradient(term_of, chunk.logprobs, rows)
                losses.append(loss)
                clipped += clips
                logits_grad = chunk.gradient(targets, grad).to(hidden_NH.dtype)
                torch.mm(logits_grad.t(), weight, out=hidden_grad[rows])
                if hidden_NH.dtype == weight_grad_VH.dtype:
                    weight_grad_VH.addmm_(logits_grad, scaled[rows])
                else:
                    weight_grad_VH += logits_grad @ scaled[rows]
        if hidden_grad is not None and distribution.temperature != 1:
            hidden_grad /= distribution.temperature
        return HeadResult(logprobs, entropy, sum(losses), clipped, hidden_grad)

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


def _gradient(term_of: TermOf, logprobs: Tensor, rows: slice) -> tuple[float, Tensor, int]:
    with torch.enable_grad():
        leaf = logprobs.detach().clone().requires_grad_()
        terms, clipped = term_of(leaf, rows)
        loss = terms.sum(dtype=torch.float64)
        (grad,) = torch.autograd.grad(loss, leaf)
    return loss.item(), grad, int(clipped.sum())


def kept_tokens(logits_Vn: Tensor, targets_n: Tensor, distribution: Distribution) -> Tensor | None:
    """[V, n], True where the distribution keeps a token; None where it keeps all. See the module's text."""
    vocab = len(logits_Vn)
    use_k = 0 < distribution.top_k < vocab
    if not use_k and distribution.top_p >= 1:
        return None
    kept = torch.ones_like(logits_Vn, dtype=torch.bool)
    if use_k:
        kept &= logits_Vn >= logits_Vn.topk(distribution.top_k, dim=0).values[-1]
    if distribution.top_p < 1:
        limited = logits_Vn.masked_fill(~kept, -torch.inf)
        kept &= limited >= _top_p_edge(limited, distribution.top_p)
    return kept.scatter_(0, targets_n[None], True)


def _top_p_edge(logits_Vn: Tensor, top_p: float) -> Tensor:
    """The least logit of the smallest set of largest ones that reaches ``top_p``, per column."""
    vocab = len(logits_Vn)
    rows_nV = logits_Vn.t().contiguous()
    total_n1 = logits_Vn.double().logsumexp(0)[:, None]
    for width in (min(_CANDIDATES, vocab), vocab):
        largest_nW = rows_nV.topk(width, dim=-1).values
        short_nW = (largest_nW.double() - total_n1).exp().cumsum(-1) < top_p
        if not short_nW[:, -1].any():
            break  # most distributions reach it within the candidates: no need to sort the vocabulary
    return largest_nW.gather(1, short_nW.sum(-1, keepdim=True).clamp(max=width - 1))[:, 0]
