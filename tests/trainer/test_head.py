"""The chunked head equals log_softmax over the whole vocabulary, with gradients, for every distribution."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from palestra.algorithms.losses import TargetLoss, target_loss
from palestra.batches import LossSpec
from palestra.rollouts.native.sampler import shape_logits
from palestra.trainer.head import Distribution, Head, kept_tokens
from palestra.types import SamplingParams

torch.set_num_threads(1)
VOCAB, HIDDEN, COUNT = 97, 16, 23

DISTRIBUTIONS = [
    Distribution(),
    Distribution(temperature=0.6),
    Distribution(temperature=1.3),
    Distribution(top_k=5),
    Distribution(top_p=0.7),
    Distribution(temperature=0.6, top_p=0.9, top_k=20),
    Distribution(temperature=1.3, top_p=0.05),
    Distribution(top_k=VOCAB + 5),
]


def naive_keep(logits: Tensor, target: int, how: Distribution) -> set[int]:
    """The documented definition on one row, token by token."""
    order = sorted(range(VOCAB), key=lambda t: -logits[t])
    if how.top_k:
        edge = logits[order[min(how.top_k, VOCAB) - 1]]
        order = [t for t in order if logits[t] >= edge]
    if how.top_p < 1:
        weights = (logits[order] - logits[order[0]]).exp()
        shares = (weights / weights.sum()).tolist()
        count, total = 0, 0.0
        while total < how.top_p and count < len(order):
            total += shares[count]
            count += 1
        order = order[:count]
    return {*order, target}


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, how: Distribution) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.t() / how.temperature
    keep = torch.zeros_like(logits, dtype=torch.bool)
    for row, target in enumerate(targets.tolist()):
        keep[row, list(naive_keep(logits[row].detach(), target, how))] = True
    logprobs = logits.masked_fill(~keep, -torch.inf).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs.masked_fill(~keep, 0)).sum(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropy


def example() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(COUNT, HIDDEN, generator=draw)
    weight = torch.randn(VOCAB, HIDDEN, generator=draw)
    return hidden, weight, torch.randint(0, VOCAB, (COUNT,), generator=draw)


def head(chunk_rows: int = 7) -> Head:
    made = Head(VOCAB)
    made.chunk_rows = chunk_rows
    return made


@pytest.mark.parametrize("how", DISTRIBUTIONS, ids=str)
def test_logprobs_and_entropy_equal_the_whole_softmax(how: Distribution) -> None:
    """Case 10 (trl#4159): one definition of the distribution, with temperature, top-k and top-p."""
    hidden, weight, targets = example()
    found_logprobs, found_entropy = head().score(hidden, weight, targets, how)
    logprobs, entropy = naive(hidden.double(), weight.double(), targets, how)
    torch.testing.assert_close(found_logprobs.double(), logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_entropy.double(), entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", DISTRIBUTIONS, ids=str)
@pytest.mark.parametrize("spec", [LossSpec(), LossSpec("nll")], ids=["policy", "nll"])
def test_gradients_equal_autograd_through_the_whole_softmax(how: Distribution, spec: LossSpec) -> None:
    hidden, weight, targets = example()
    draw = torch.Generator().manual_seed(1)
    weights = torch.randn(COUNT, generator=draw)
    wide_hidden, wide_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logprobs, _ = naive(wide_hidden, wide_weight, targets, how)
    old = (logprobs.detach() + torch.randn(COUNT, generator=draw) * 0.3).float()
    loss = target_loss(spec, logprobs, old.double(), weights.double()).terms_N.sum()
    loss.backward()

    def term_of(found: Tensor, rows: slice) -> TargetLoss:
        return target_loss(spec, found, old[rows], weights[rows])

    weight_grad = torch.ones(VOCAB, HIDDEN)
    found = head().train(hidden, weight, targets, how, term_of, weight_grad)
    assert found.loss == pytest.approx(loss.item(), rel=1e-5)
    scored_logprobs, scored_entropy = head().score(hidden, weight, targets, how)
    assert torch.equal(found.logprobs_N, scored_logprobs)
    assert torch.equal(found.entropy_N, scored_entropy)
    torch.testing.assert_close(found.hidden_grad_NH.double(), wide_hidden.grad, rtol=1e-4, atol=1e-5)
    # Added to what was there, so that micro-batches accumulate.
    torch.testing.assert_close(weight_grad.double() - 1, wide_weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk_rows", [1, 5, COUNT, 1000])
def test_the_chunk_size_changes_nothing_but_rounding(chunk_rows: int) -> None:
    hidden, weight, targets = example()
    how = Distribution(temperature=0.6, top_k=9)
    whole_logprobs, whole_entropy = head(COUNT).score(hidden, weight, targets, how)
    logprobs, entropy = head(chunk_rows).score(hidden, weight, targets, how)
    torch.testing.assert_close(logprobs, whole_logprobs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy, whole_entropy, rtol=1e-5, atol=1e-5)


def test_no_buffer_holds_more_than_one_chunk() -> None:
    hidden, weight, targets = example()
    small = head(4)
    small.score(hidden, weight, targets, Distribution())
    assert max(buffer.numel() for buffer in small._buffers) == 4 * VOCAB
    assert Head(49_152).chunk_rows * 49_152 * 4 <= 48 << 20
    assert Head(1_000_000).chunk_rows == 32


def test_the_target_is_always_kept_although_it_lies_outside_top_k() -> None:
    hidden, weight, _ = example()
    targets = (hidden @ weight.t()).argmin(-1)
    logprobs, _ = head().score(hidden, weight, targets, Distribution(top_k=1))
    assert torch.isfinite(logprobs).all()
    assert (logprobs < -1).all()


def test_without_top_k_and_top_p_nothing_is_masked() -> None:
    assert kept_tokens(torch.randn(VOCAB, 3), torch.tensor([0, 1, 2]), Distribution(top_k=VOCAB)) is None


def test_bf16_products_stay_near_fp32() -> None:
    hidden, weight, targets = example()
    exact, _ = head().score(hidden, weight, targets, Distribution())
    found, _ = head().score(hidden.bfloat16(), weight, targets, Distribution())
    assert found.dtype == torch.float32
    assert (found - exact).abs().mean() < 0.1


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("how", DISTRIBUTIONS, ids=str)
def test_the_engine_samples_from_exactly_the_distribution_that_is_trained(
    how: Distribution, spread: float
) -> None:
    """Case 10 (trl#4159, NeMo-RL PR#316): two sides with two definitions of temperature, top-k or top-p.

    5,000 tokens, nearly flat at the smallest spread: top-p then reaches beyond the first candidates.
    """
    draw = torch.Generator().manual_seed(7)
    logits = (torch.randn(4, 5_000, generator=draw) * spread * 16).round() / 16  # rounding makes ties
    shaped = shape_logits(
        logits, [SamplingParams(temperature=how.temperature, top_p=how.top_p, top_k=how.top_k)] * 4
    )
    top = logits.argmax(-1)
    kept = kept_tokens((logits / how.temperature).t().contiguous(), top, how)
    expected = torch.ones_like(logits, dtype=torch.bool) if kept is None else kept.t()
    assert torch.equal(shaped > -torch.inf, expected)
