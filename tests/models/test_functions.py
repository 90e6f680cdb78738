"""Backward passes written by hand equal autograd's, and weight gradients only ever add up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from palestra.models.config import ModelConfig
from palestra.models.functions import GatedDown, Lookup, Project, RmsNorm, Rotate, add_product, gradient_of
from palestra.models.rotary import rotary_tables, rotated

ROWS, WIDE, NARROW = 7, 12, 8
EPSILON = 1e-5


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def config(head_dim: int = 8) -> ModelConfig:
    return ModelConfig(
        "LlamaForCausalLM", 10, 16, 32, 1, 2, 1, head_dim, 10_000.0, EPSILON, True, 64, (), None, "float32"
    )


COS, SIN = rotary_tables(config(), torch.arange(3, 3 + ROWS), torch.float64)
TOKENS = torch.tensor([1, 4, 4, 0, 11, 4, 1])


def plain_rotation(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * COS + torch.cat((-right, left), -1) * torch.cat((SIN, SIN), -1)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "project": (
        lambda x, a, b: torch.cat(Project.apply(x, a, b), -1),
        lambda x, a, b: torch.cat((x @ a.t(), x @ b.t()), -1),
        [(ROWS, WIDE), (NARROW, WIDE), (3, WIDE)],
    ),
    "gated down": (
        GatedDown.apply,
        lambda gate, up, weight: (functional.silu(gate) * up) @ weight.t(),
        [(ROWS, WIDE), (ROWS, WIDE), (NARROW, WIDE)],
    ),
    "rotate": (lambda x: Rotate.apply(x, COS, SIN), plain_rotation, [(ROWS, 2, NARROW)]),
    "norm": (lambda x, w: RmsNorm.apply(x, w, EPSILON), plain_norm, [(ROWS, WIDE), (WIDE,)]),
    "lookup": (lambda w: Lookup.apply(w, TOKENS), lambda w: w[TOKENS], [(WIDE, NARROW)]),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_those_of_the_plain_definition(name: str) -> None:
    ours, plain, shapes = CASES[name]
    inputs = [draw(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    copies = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    found, expected = ours(*inputs), plain(*copies)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    direction = draw(*found.shape, seed=9).detach()
    for _ in range(2):  # the second pass adds to the first
        ours(*inputs).backward(direction)
        plain(*copies).backward(direction)
    for tensor, copy in zip(inputs, copies, strict=True):
        torch.testing.assert_close(tensor.grad, copy.grad, rtol=1e-12, atol=1e-12)


def test_an_output_nobody_used_has_no_part_in_any_gradient() -> None:
    x, used, unused = draw(ROWS, WIDE), draw(3, WIDE, seed=1), draw(5, WIDE, seed=2)
    Project.apply(x, used, unused)[0].sum().backward()
    assert unused.grad is not None
    assert not unused.grad.any()
    torch.testing.assert_close(x.grad, used.detach().sum(0).expand(ROWS, -1))


def test_in_bf16_a_weights_gradient_is_summed_in_fp32() -> None:
    """A sum kept in bf16 stops growing after some 256 equal addends."""
    weight = torch.ones(1, 1, requires_grad=True)
    x = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(1000):
        Project.apply(x, weight)[0].sum().backward()
    assert weight.grad is not None
    assert weight.grad.item() == 1000.0


def test_rotating_back_by_the_same_angles_undoes_it_and_keeps_lengths() -> None:
    x = draw(ROWS, 2, NARROW).detach()
    turned = rotated(x, COS, SIN)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(rotated(turned, COS, -SIN), x)


def test_what_two_positions_say_to_each_other_depends_on_their_distance_alone() -> None:
    query, key = draw(1, 1, NARROW, seed=1).detach(), draw(1, 1, NARROW, seed=2).detach()

    def score(at: int, to: int) -> float:
        turned = [
            rotated(x, *rotary_tables(config(), torch.tensor([p]), torch.float64))
            for x, p in ((query, at), (key, to))
        ]
        return (turned[0] * turned[1]).sum().item()

    assert score(7, 2) == pytest.approx(score(25, 20), abs=1e-5)
    assert score(7, 2) != pytest.approx(score(7, 3), abs=1e-3)


def test_a_gradient_that_is_not_there_yet_is_zeros_and_is_then_the_same_tensor() -> None:
    weight = draw(2, 3)
    assert not gradient_of(weight).any()
    gradient_of(weight).add_(1)
    assert gradient_of(weight) is weight.grad
    assert gradient_of(weight).sum() == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_added_whatever_types_it_is_of(dtype: torch.dtype) -> None:
    total = torch.ones(2, 2)
    add_product(total, torch.eye(2, dtype=dtype), torch.full((2, 2), 3.0, dtype=dtype))
    assert torch.equal(total, torch.full((2, 2), 4.0))
