"""The loss of each target: by hand on three tokens, against the formula in double precision, at the edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.forest import naive_loss
from helpers.naive_losses import naive_spec_loss
from palestra.algorithms.losses import kl_estimate, sequence_ratio, target_loss
from palestra.batches import LossSpec


def graded(spec: LossSpec, logprobs: list[float], old: list[float] | None, weights: list[float]):
    """(terms, clipped, gradient) as lists."""
    leaf = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    before = None if old is None else torch.tensor(old, dtype=torch.float64)
    terms, clipped = target_loss(spec, leaf, before, torch.tensor(weights, dtype=torch.float64))
    (grad,) = torch.autograd.grad(terms.sum(), leaf)
    return terms.tolist(), clipped.tolist(), grad.tolist()


def test_policy_loss_by_hand_on_three_tokens() -> None:
    # Ratios 1.5, 0.5, 1.1 with clip 0.2: the first (w > 0) is clipped at 1.2, the second (w < 0) at 0.8.
    old = [-2.0, -1.0, -0.5]
    logprobs = [o + math.log(r) for o, r in zip(old, (1.5, 0.5, 1.1), strict=True)]
    terms, clipped, grad = graded(LossSpec(), logprobs, old, [2.0, -1.0, 1.0])
    assert terms == pytest.approx([-2.4, 0.8, -1.1])
    assert clipped == [True, True, False]
    assert grad == pytest.approx([0.0, 0.0, -1.1])


def test_the_pessimistic_side_is_never_clipped() -> None:
    # A bad token whose ratio grew, a good one whose ratio shrank: the minimum keeps the ratio.
    old = [-2.0, -2.0]
    logprobs = [-2.0 + math.log(1.5), -2.0 + math.log(0.5)]
    terms, clipped, grad = graded(LossSpec(), logprobs, old, [-1.0, 1.0])
    assert terms == pytest.approx([1.5, -0.5])
    assert clipped == [False, False]
    assert grad == pytest.approx([1.5, -0.5])


def test_clip_higher_has_a_side_of_its_own() -> None:
    """DAPO (arXiv:2503.14476): 0.2 below, 0.28 above."""
    logprobs = [-1.0 + math.log(1.25), -1.0 + math.log(1.3), -1.0 + math.log(0.75)]
    terms, clipped, _ = graded(LossSpec(clip_low=0.2, clip_high=0.28), logprobs, [-1.0] * 3, [1.0, 1.0, -1.0])
    assert terms == pytest.approx([-1.25, -1.28, 0.8])
    assert clipped == [False, True, True]


def test_without_old_logprobs_the_ratio_is_exactly_one_and_the_gradient_that_of_the_logprob() -> None:
    terms, clipped, grad = graded(LossSpec(), [-3.0, -0.1, -7.0], None, [0.5, -0.25, 0.0])
    assert terms == [-0.5, 0.25, 0.0]
    assert clipped == [False] * 3
    assert grad == [-0.5, 0.25, 0.0]


def test_a_clip_of_zero_clips_nothing_while_the_ratio_is_one() -> None:
    _, clipped, grad = graded(LossSpec(clip_low=0, clip_high=0), [-3.0, -1.0], None, [1.0, -1.0])
    assert clipped == [False, False]
    assert grad == [-1.0, 1.0]


def test_nll_by_hand() -> None:
    terms, clipped, grad = graded(LossSpec("nll"), [-1.0, -2.0, -4.0], [-9.0] * 3, [0.25, 0.25, 0.5])
    assert terms == [0.25, 0.5, 2.0]
    assert clipped == [False] * 3
    assert grad == [-0.25, -0.25, -0.5]


def test_a_clipped_ratio_that_overflows_has_a_zero_gradient_and_not_nan() -> None:
    leaf = torch.tensor([-0.5, -0.5], requires_grad=True)
    terms, clipped = target_loss(LossSpec(), leaf, torch.tensor([-500.0, -0.5]), torch.tensor([1.0, 1.0]))
    (grad,) = torch.autograd.grad(terms.sum(), leaf)
    assert terms.tolist() == pytest.approx([-1.2, -1.0])
    assert clipped.tolist() == [True, False]
    assert grad.tolist() == [0.0, -1.0]


rows = st.lists(
    st.tuples(st.floats(-8, -0.01), st.floats(-1.5, 1.5), st.floats(-2, 2)), min_size=1, max_size=12
)


@given(rows, st.sampled_from([(0.2, 0.2), (0.2, 0.28), (0.0, 0.0), (0.9, 3.0)]))
def test_policy_loss_and_gradient_equal_the_paper_in_double_precision(
    rows: list[tuple[float, float, float]], clip: tuple[float, float]
) -> None:
    spec = LossSpec(clip_low=clip[0], clip_high=clip[1])
    # A ratio exactly on the clip has two subgradients; both are right, so the comparison leaves it out.
    edges = (math.log1p(clip[1]), math.log1p(-clip[0]))
    rows = [r for r in rows if all(abs(r[1] - edge) > 1e-9 for edge in edges)] or [(-1.0, 0.05, 1.0)]
    old = torch.tensor([r[0] for r in rows], dtype=torch.float64)
    weights = torch.tensor([r[2] for r in rows], dtype=torch.float64)
    grads = []
    for loss in (naive_loss, lambda *a: target_loss(*a).terms_N.sum()):
        leaf = (old + torch.tensor([r[1] for r in rows], dtype=torch.float64)).requires_grad_()
        value = loss(spec, leaf, old, weights)
        grads.append((value.detach(), *torch.autograd.grad(value, leaf)))
    torch.testing.assert_close(grads[1][0], grads[0][0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads[1][1], grads[0][1], rtol=1e-12, atol=1e-12)


@given(st.integers(1, 11))
def test_terms_do_not_depend_on_the_chunk_they_are_computed_in(cut: int) -> None:
    """Case 11 (trl#4772): a term sees its own target only."""
    torch.manual_seed(cut)
    logprobs, old, weights = -torch.rand(12) * 3, -torch.rand(12) * 3, torch.randn(12)
    whole = target_loss(LossSpec(), logprobs, old, weights)
    pieces = [
        target_loss(LossSpec(), logprobs[s], old[s], weights[s]) for s in (slice(0, cut), slice(cut, 12))
    ]
    assert torch.equal(torch.cat([p.terms_N for p in pieces]), whole.terms_N)
    assert torch.equal(torch.cat([p.clipped_N for p in pieces]), whole.clipped_N)


# -- the other kinds, on three tokens: ratios 1.5, 0.5, 1.1; weights 2, -1, 1

OLD = [-2.0, -1.0, -0.5]
LOGPROBS = [o + math.log(r) for o, r in zip(OLD, (1.5, 0.5, 1.1), strict=True)]
WEIGHTS = [2.0, -1.0, 1.0]


def shared(spec: LossSpec, weights: list[float], ids: list[int], old: list[float] | None = OLD):
    """As ``graded``, with the ratio of each target's sequence."""
    leaf = torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)
    before = None if old is None else torch.tensor(old, dtype=torch.float64)
    log_ratio = None if before is None else leaf.detach() - before
    sequence = sequence_ratio(spec.ratio, torch.tensor(ids), log_ratio)
    terms, clipped = target_loss(
        spec, leaf, before, torch.tensor(weights, dtype=torch.float64), sequence=sequence
    )
    (grad,) = torch.autograd.grad(terms.sum(), leaf)
    return terms.tolist(), clipped.tolist(), grad.tolist()


def test_gspo_by_hand_shares_the_geometric_mean_of_a_sequences_ratios() -> None:
    spec = LossSpec(clip_low=0.2, clip_high=0.2, ratio="sequence")
    mean = math.sqrt(0.75)  # of 1.5 and 0.5, in the first sequence
    terms, clipped, grad = shared(spec, [2.0, 2.0, 1.0], [0, 0, 1])
    assert terms == pytest.approx([-2 * mean, -2 * mean, -1.1])
    assert clipped == [False] * 3
    assert grad == pytest.approx([-2 * mean, -2 * mean, -1.1])
    terms, clipped, grad = shared(
        LossSpec(clip_low=0.1, clip_high=0.05, ratio="sequence"), [-1, -1, 1], [0, 0, 1]
    )
    assert terms == pytest.approx([0.9, 0.9, -1.05])
    assert clipped == [True] * 3
    assert grad == [0.0] * 3


def test_rloo_by_hand_is_one_term_a_sequence_with_the_ratio_of_its_probability() -> None:
    spec = LossSpec(clip_low=0.5, clip_high=0.5, ratio="product")
    terms, clipped, grad = shared(spec, [2.0, 2.0, 1.0], [0, 0, 1])
    assert sum(terms[:2]) == pytest.approx(-2 * 0.75)
    assert terms[2] == pytest.approx(-1.1)
    assert clipped == [False] * 3
    assert grad == pytest.approx([-1.5, -1.5, -1.1])  # d/dlp of -2 * 0.75 is the whole ratio, for each token
    terms, clipped, grad = shared(spec, [-2.0, -2.0, 1.0], [0, 0, 0])
    assert terms[:2] == pytest.approx([2 * 0.825 / 3] * 2)  # 1.5 * 0.5 * 1.1, shared by three


def test_without_old_logprobs_a_sequences_ratio_is_one() -> None:
    for ratio, value in (("sequence", -1.0), ("product", -1 / 3)):
        spec = LossSpec(clip_low=0.0, clip_high=0.0, ratio=ratio)  # type: ignore[arg-type]
        terms, clipped, grad = shared(spec, [1.0] * 3, [4, 4, 4], None)
        assert terms == pytest.approx([value] * 3)
        assert clipped == [False] * 3
        assert grad == [-1.0] * 3


def test_a_sequences_ratio_must_be_given() -> None:
    with pytest.raises(ValueError, match="the ratio of a sequence needs"):
        graded(LossSpec(ratio="sequence"), LOGPROBS, OLD, WEIGHTS)


def test_dual_clip_by_hand_bounds_what_a_bad_token_may_cost() -> None:
    terms, clipped, grad = graded(
        LossSpec(dual_clip=3.0), [-1.0 + math.log(5), -1.0], [-1.0] * 2, [-1.0, -1.0]
    )
    assert terms == pytest.approx([3.0, 1.0])
    assert clipped == [True, False]
    assert grad == pytest.approx([0.0, 1.0])


def test_cispo_by_hand_bounds_the_weight_and_keeps_every_tokens_gradient() -> None:
    terms, clipped, grad = graded(LossSpec("cispo", clip_low=1.0, clip_high=0.2), LOGPROBS, OLD, WEIGHTS)
    bounded = [1.2, 0.5, 1.1]
    assert terms == pytest.approx([-b * w * p for b, w, p in zip(bounded, WEIGHTS, LOGPROBS, strict=True)])
    assert clipped == [True, False, False]
    assert grad == pytest.approx([-2.4, 0.5, -1.1])
    _, clipped, grad = graded(LossSpec("cispo", clip_low=0.2, clip_high=0.2), LOGPROBS, OLD, WEIGHTS)
    assert clipped == [True, True, False]
    assert grad == pytest.approx([-2.4, 0.8, -1.1])


def test_sapo_by_hand_closes_softly_and_sooner_for_bad_tokens() -> None:
    terms, clipped, grad = graded(LossSpec("sapo"), LOGPROBS, OLD, WEIGHTS)

    def gate(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    gates = [gate(0.5), gate(1.05 * -0.5), gate(0.1)]
    assert terms == pytest.approx([-2 * 4 * gates[0], 4 / 1.05 * gates[1], -4 * gates[2]])
    assert clipped == [False] * 3
    slopes = [4 * g * (1 - g) * r for g, r in zip(gates, (1.5, 0.5, 1.1), strict=True)]
    assert grad == pytest.approx([-2 * slopes[0], slopes[1], -slopes[2]])


def test_sapo_at_a_ratio_of_one_has_the_policy_gradient() -> None:
    _, _, grad = graded(LossSpec("sapo"), [-3.0, -1.0], None, [0.5, -2.0])
    assert grad == pytest.approx([-0.5, 2.0])


def test_a_ratio_that_overflows_closes_sapos_gate_and_leaves_no_nan() -> None:
    leaf = torch.tensor([-0.5, -0.5], requires_grad=True)
    terms, _ = target_loss(LossSpec("sapo"), leaf, torch.tensor([-500.0, -200.0]), torch.tensor([1.0, -1.0]))
    (grad,) = torch.autograd.grad(terms.sum(), leaf)
    assert terms.tolist() == pytest.approx([-4.0, 4 / 1.05])
    assert grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("estimator", "values", "slopes"),
    [
        ("k1", [math.log(2), -math.log(4)], [1.0, 1.0]),
        ("k2", [math.log(2) ** 2 / 2, math.log(4) ** 2 / 2], [math.log(2), -math.log(4)]),
        ("k3", [0.5 - 1 + math.log(2), 4 - 1 - math.log(4)], [0.5, -3.0]),
        ("k3+", [0.5 - 1 + math.log(2), 4 - 1 - math.log(4)], [math.log(2), -math.log(4)]),
    ],
)
def test_kl_estimates_by_hand_and_their_gradients(
    estimator, values: list[float], slopes: list[float]
) -> None:
    leaf = torch.tensor([math.log(2), -math.log(4)], dtype=torch.float64, requires_grad=True)
    found = kl_estimate(estimator, leaf)
    (grad,) = torch.autograd.grad(found.sum(), leaf)
    assert found.tolist() == pytest.approx(values)
    assert grad.tolist() == pytest.approx(slopes)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3+"])
def test_the_kl_of_two_equal_policies_is_exactly_zero(estimator) -> None:
    assert kl_estimate(estimator, torch.zeros(3)).tolist() == [0.0] * 3


def test_k3_and_k1_measure_the_kl_and_k3_plus_has_its_gradient_in_expectation() -> None:
    """Exact sums over four tokens: E[k1] = E[k3] = KL, and E[grad k3+] = grad KL, which E[grad k1] is not."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    logprobs = logits.log_softmax(0)
    kl = (logprobs.exp() * (logprobs - ref)).sum()
    (exact,) = torch.autograd.grad(kl, logits, retain_graph=True)
    chances = logprobs.exp().detach()
    for estimator in ("k1", "k3"):
        assert (chances * kl_estimate(estimator, logprobs - ref)).sum().item() == pytest.approx(kl.item())
    grads = {
        e: torch.autograd.grad((chances * kl_estimate(e, logprobs - ref)).sum(), logits, retain_graph=True)[0]
        for e in ("k1", "k2", "k3+")
    }
    torch.testing.assert_close(grads["k3+"], exact)
    torch.testing.assert_close(grads["k2"], exact)
    torch.testing.assert_close(grads["k1"], torch.zeros(4, dtype=torch.float64), atol=1e-12, rtol=0)


def test_the_kl_term_does_not_ask_the_weight_and_needs_its_columns() -> None:
    leaf = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    ref, share = torch.tensor([-1.0, -3.0]).double(), torch.tensor([0.5, 0.25]).double()
    spec = LossSpec(kl_coef=2.0, kl="k2")
    terms, _ = target_loss(spec, leaf, None, torch.zeros(2), ref_logprobs_N=ref, kl_weights_N=share)
    assert terms.tolist() == pytest.approx([0.0, 2 * 0.25 * 0.5])
    for columns in ({}, {"ref_logprobs_N": ref}, {"kl_weights_N": share}):
        with pytest.raises(ValueError, match="kl_coef is set"):
            target_loss(spec, leaf, None, torch.zeros(2), **columns)


def test_a_reference_that_is_far_away_does_not_make_k3_infinite() -> None:
    assert torch.isfinite(kl_estimate("k3", torch.tensor([-300.0, 300.0]))).all()


SPECS = [
    LossSpec(dual_clip=1.4, clip_high=0.3),
    LossSpec("cispo", clip_low=1.0, clip_high=0.3),
    LossSpec("cispo", clip_low=0.3, clip_high=0.3),
    LossSpec("sapo", temperature_positive=2.0),
    LossSpec(ratio="sequence", clip_low=0.1, clip_high=0.1),
    LossSpec(ratio="product", clip_low=0.4, clip_high=0.4),
    LossSpec(kl_coef=0.2, kl="k3"),
    LossSpec(kl_coef=0.2, kl="k1", kl_ratio_corrected=True),
    LossSpec("sapo", kl_coef=0.2, kl="k3+"),
    LossSpec("nll", kl_coef=0.2, kl="k2"),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@given(st.integers(0, 10_000), st.booleans())
def test_loss_and_gradient_equal_the_papers_in_double_precision(
    spec: LossSpec, seed: int, on_policy: bool
) -> None:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 5, (4,), generator=draw)
    ids = torch.arange(4).repeat_interleave(lengths)
    count = len(ids)
    logprobs = -3 * torch.rand(count, generator=draw, dtype=torch.float64)
    old = None if on_policy else logprobs + 0.4 * torch.randn(count, generator=draw, dtype=torch.float64)
    ref = logprobs + torch.randn(count, generator=draw, dtype=torch.float64)
    share = torch.rand(4, generator=draw, dtype=torch.float64)[ids]
    weights = torch.randn(4, generator=draw, dtype=torch.float64)[ids] * share

    def ours(leaf: torch.Tensor) -> torch.Tensor:
        sequence = sequence_ratio(spec.ratio, ids, None if old is None else leaf - old)
        return target_loss(
            spec, leaf, old, weights, sequence=sequence, ref_logprobs_N=ref, kl_weights_N=share
        ).terms_N.sum()

    def paper(leaf: torch.Tensor) -> torch.Tensor:
        return naive_spec_loss(spec, leaf, old, weights, ids.tolist(), ref, share)

    found = []
    for loss in (ours, paper):
        leaf = logprobs.clone().requires_grad_()
        value = loss(leaf)
        found.append((value.detach(), *torch.autograd.grad(value, leaf)))
    exact = 1e-10 if old is not None else 1e-7  # without old logprobs a sequence's share is float32
    torch.testing.assert_close(found[0][0], found[1][0], rtol=exact, atol=exact)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-10, atol=1e-10)


DIFFERENTIABLE = [s for s in SPECS if s.ratio == "token" and s.kl != "k3+" and s.kind != "cispo"]


@pytest.mark.parametrize("spec", DIFFERENTIABLE, ids=str)
def test_gradients_equal_finite_differences(spec: LossSpec) -> None:
    """Where nothing is held constant on purpose, and away from the kinks of a clip."""
    old = torch.tensor([-1.0, -2.0, -0.7, -3.0], dtype=torch.float64)
    leaf = (old + torch.tensor([0.1, -0.05, 0.6, -0.6], dtype=torch.float64)).requires_grad_()
    weights = torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64)
    share = torch.full((4,), 0.25, dtype=torch.float64)

    def loss(values: torch.Tensor) -> torch.Tensor:
        return target_loss(
            spec, values, old, weights, ref_logprobs_N=old - 0.3, kl_weights_N=share
        ).terms_N.sum()

    assert torch.autograd.gradcheck(loss, (leaf,))


@given(st.integers(0, 10_000))
def test_a_weight_of_zero_gives_a_term_and_a_gradient_of_exactly_zero(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for spec in (s for s in SPECS if not s.kl_coef):
        leaf = (-3 * torch.rand(5, generator=draw)).requires_grad_()
        old = leaf.detach() + torch.randn(5, generator=draw)
        sequence = sequence_ratio(spec.ratio, torch.tensor([0, 0, 1, 1, 1]), leaf.detach() - old)
        terms, clipped = target_loss(spec, leaf, old, torch.zeros(5), sequence=sequence)
        (grad,) = torch.autograd.grad(terms.sum(), leaf)
        assert terms.tolist() == [0.0] * 5
        assert grad.tolist() == [0.0] * 5
        assert spec.kind == "cispo" or not clipped.any()


@given(st.integers(0, 10_000))
def test_a_sequences_ratio_does_not_depend_on_the_order_of_its_targets_or_on_other_sequences(
    seed: int,
) -> None:
    """Case 11 (trl#4772)."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 4, (12,), generator=draw)
    log_ratio = torch.randn(12, generator=draw)
    order = torch.randperm(12, generator=draw)
    for ratio in ("sequence", "product"):
        whole = sequence_ratio(ratio, ids, log_ratio)
        turned = sequence_ratio(ratio, ids[order], log_ratio[order])
        assert whole is not None
        assert turned is not None
        torch.testing.assert_close(turned.log_N, whole.log_N[order], rtol=1e-6, atol=1e-6)
        for own in ids.unique():
            alone = sequence_ratio(ratio, ids[ids == own], log_ratio[ids == own])
            assert alone is not None
            assert torch.equal(alone.log_N, whole.log_N[ids == own])
            assert torch.equal(alone.share_N, whole.share_N[ids == own])
