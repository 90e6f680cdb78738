"""The differentiable pieces of the model, with backward passes written out.

A weight's gradient is added straight to its ``grad``, by the matrix product that
computes it: nothing of a weight's size is built beside it, and autograd sees none.
What is saved for the backward pass is the least that gives it. A weight is kept as
the object it is: a saved tensor may come back as another one, whose ``grad`` nobody
would read (where layers are computed twice, it does). Weights are fp32;
products run in the type of their input, and the gradients of weights stay fp32.
Not twice differentiable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear, silu

from palestra.models.rotary import rotated


def gradient_of(weight: Tensor) -> Tensor:
    """The weight's ``grad``; zeros, if nothing was added to it yet."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, in one pass where the types allow it."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _add_weight_grad(weight: Tensor, grad_TO: Tensor, x_TI: Tensor) -> None:
    if weight.grad is None:
        weight.grad = (grad_TO.t() @ x_TI).to(weight.dtype)
    else:
        add_product(weight.grad, grad_TO.t(), x_TI)


class Lookup(Function):
    """(weight [V, H], tokens [T]) -> the tokens' rows. Its gradient touches these rows only."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(tokens)
        return weight.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        (tokens,) = ctx.saved_tensors
        gradient_of(ctx.weight).index_add_(0, tokens, grads[0])
        return None, None


class Project(Function):
    """(x [T, I], weights [O, I], ...) -> one [T, O] for each weight; x is saved once for all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.weights = weights
        ctx.save_for_backward(x)
        return tuple(linear(x, weight.to(x.dtype)) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weights = ctx.saved_tensors, ctx.weights
        x_grad = grads[0] @ weights[0].to(x.dtype)
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            x_grad.addmm_(grad, weight.to(x.dtype))
        for grad, weight in zip(grads, weights, strict=True):
            _add_weight_grad(weight, grad, x)
        return x_grad, *[None] * len(weights)


class GatedDown(Function):
    """``silu(gate) * up`` and the projection after it; saves only gate and up, the widest rows of a layer."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(gate, up)
        return linear(silu(gate).mul_(up), weight.to(gate.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (gate, up), weight = ctx.saved_tensors, ctx.weight
        active = silu(gate)
        _add_weight_grad(weight, grads[0], active * up)
        inner_grad = grads[0] @ weight.to(gate.dtype)
        up_grad = active.mul_(inner_grad)
        return torch.ops.aten.silu_backward(inner_grad.mul_(up), gate), up_grad, None


class Rotate(Function):
    """`rotated`; needs no more of its input than the gradient of its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotated(grads[0], cos, -sin), None, None


class RmsNorm(Function):
    """Saves its input and one number per row; half the time of the composed backward on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scale = x.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        weight_grad = (grads[0] * normed).sum(0)
        grad = grads[0] * weight
        mean = torch.linalg.vecdot(grad, normed).div_(x.shape[-1])[:, None]
        return normed.mul_(-mean).add_(grad).mul_(scale), weight_grad, None
