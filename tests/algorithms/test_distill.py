"""A teacher's advantage token by token, and teachers that speak another language."""

from __future__ import annotations

import pytest
import torch

from palestra.algorithms.distill import distillation_weights, require_one_vocabulary
from palestra.algorithms.losses import target_loss
from palestra.batches import LossSpec
from palestra.errors import ConfigError


def test_the_weight_by_hand_is_how_much_likelier_the_teacher_finds_the_token() -> None:
    found = distillation_weights([-1.0, -3.0, -2.0], [-2.0, -1.0, -2.0], [0.5, 0.25, 0.25])
    assert list(found) == [0.5, -0.5, 0.0]
    with pytest.raises(ValueError, match="argument"):
        distillation_weights([-1.0], [-1.0, -2.0], [1.0])


def test_in_expectation_the_update_is_the_gradient_of_the_reverse_kl() -> None:
    """An exact sum over five tokens, in place of samples."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.0, 0.5], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25], dtype=torch.float64).log()
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), logits, retain_graph=True)
    chances = logprobs.detach().exp().tolist()
    weights = distillation_weights(teacher.tolist(), logprobs.tolist(), chances)
    terms, _ = target_loss(LossSpec(), logprobs, None, torch.tensor(weights.tolist(), dtype=torch.float64))
    (found,) = torch.autograd.grad(terms.sum(), logits)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-7)


def test_a_teacher_that_agrees_teaches_nothing() -> None:
    assert list(distillation_weights([-1.5, -0.1], [-1.5, -0.1], [1.0, 1.0])) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        ([b"a", b"c"], "token 1 is 'c', not 'b'"),
        ([b"a", b"b", b"\xff"], "(3 tokens, not 2; token 2 is '\ufffd', not missing)"),
        ([b"a"], "token 1 is missing, not 'b'"),
        ([], "token 0 is missing, not 'a'"),
    ],
)
def test_a_teacher_of_another_vocabulary_is_refused_with_the_first_token_that_differs(
    teacher: list[bytes], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        require_one_vocabulary([b"a", b"b"], teacher, "org/teacher")
    (problem,) = caught.value.problems
    assert problem.startswith("algorithm.reference: org/teacher has another vocabulary than the model")
    assert said in problem
    assert problem.endswith("nearest: a model of the same family and tokenizer")


def test_the_same_vocabulary_is_accepted() -> None:
    require_one_vocabulary([b"a", b"b"], (b"a", b"b"), "twin")
