"""What one decoder layer computes around attention: projections before it, the rest after it.

Rows are independent: a row's numbers do not depend on which other rows are computed
beside it (fp32, see `linears`), nor on which experts or adapters those use. Nothing
here knows sequences, caches or versions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from palestra.models.config import ModelConfig
from palestra.models.rotary import rotary_tables, rotated
from palestra.rollouts.native.adapters import RowAdapters
from palestra.rollouts.native.kernels import MAX_DIM, Kernels, kernels
from palestra.rollouts.native.linears import Linear, LinearOps
from palestra.rollouts.native.weights import Experts, Layer


@dataclass(frozen=True, slots=True)
class Model:
    """What does not change from version to version."""

    config: ModelConfig
    ops: LinearOps
    cos_P1D: Tensor
    sin_P1F: Tensor
    kernels: Kernels | None = None

    @classmethod
    def build(cls, config: ModelConfig, ops: LinearOps, positions: int, *, compiled: bool = True) -> Model:
        """For sequences of up to ``positions`` tokens, on the device of ``ops``.

        With the C kernels if they are wanted and work here, else with torch's own functions.
        """
        positions_P = torch.arange(positions, device=ops.device)
        fits = ops.device.type == "cpu" and config.head_dim <= MAX_DIM
        found = kernels(ops.dtype, ops.threads) if compiled and fits else None
        return cls(config, ops, *rotary_tables(config, positions_P, ops.dtype), found)


def projected(
    model: Model,
    layer: Layer,
    hidden_NH: Tensor,
    cos_N1D: Tensor,
    sin_N1F: Tensor,
    index: int = 0,
    adapters: RowAdapters | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [N, heads, D], keys and values [N, kv_heads, D]; queries and keys are rotated."""
    config = model.config
    turned = config.heads + config.kv_heads
    normed_NH = normed(hidden_NH, layer.input_norm, config.rms_norm_eps, model.kernels)
    qkv_NQ = _adapted(layer.qkv, normed_NH, f"{index}.qkv", adapters)
    qkv_NXD = qkv_NQ.view(-1, turned + config.kv_heads, config.head_dim)
    heads_NXD = qkv_NXD[:, :turned]
    if layer.head_norm is not None:
        heads_NXD = normed(heads_NXD, layer.head_norm, config.rms_norm_eps)
    if model.kernels is not None:
        model.kernels.rotate(heads_NXD, cos_N1D, sin_N1F)
        rotated_NXD = heads_NXD
    else:
        rotated_NXD = rotated(heads_NXD, cos_N1D, sin_N1F)
    return rotated_NXD[:, : config.heads], rotated_NXD[:, config.heads :], qkv_NXD[:, turned:]


def mixed(
    model: Model,
    layer: Layer,
    hidden_NH: Tensor,
    attended_NE: Tensor,
    index: int = 0,
    adapters: RowAdapters | None = None,
) -> Tensor:
    """The rest of a layer after attention: output projection, feed-forward, both residuals."""
    hidden_NH = hidden_NH + _adapted(layer.output, attended_NE, f"{index}.output", adapters)
    normed_NH = normed(hidden_NH, layer.post_norm, model.config.rms_norm_eps, model.kernels)
    if isinstance(layer.mlp, Experts):
        return hidden_NH + _routed(model, layer.mlp, normed_NH)
    gate_up_NI = _adapted(layer.mlp.gate_up, normed_NH, f"{index}.gate_up", adapters)
    gated_NI = gated(gate_up_NI, model.kernels)
    return hidden_NH + _adapted(layer.mlp.down, gated_NI, f"{index}.down", adapters)


def _adapted(product: Linear, x_NI: Tensor, key: str, adapters: RowAdapters | None) -> Tensor:
    y_NO = product(x_NI)
    if adapters is not None:
        adapters.add(key, x_NI, y_NO)
    return y_NO


def _routed(model: Model, experts: Experts, x_NH: Tensor) -> Tensor:
    """Each row's chosen experts, weighted by their shares; an expert's rows go through it together.

    Shares are of all experts, so softmax comes before the choice. A row adds its experts
    up in the experts' order, whichever of them its neighbours chose.
    """
    config, per_token = model.config, model.config.experts_per_token
    shares_NE = torch.softmax(experts.router(x_NH), dim=-1, dtype=torch.float32)
    shares_NK, chosen_NK = shares_NE.topk(per_token, dim=-1)
    if config.norm_topk_prob:
        shares_NK = shares_NK / shares_NK.sum(-1, keepdim=True)
    shares_C = shares_NK.to(x_NH.dtype).flatten()
    choices_C = chosen_NK.flatten().argsort(stable=True)
    counts = chosen_NK.flatten().bincount(minlength=config.experts).tolist()
    sum_NH = torch.zeros_like(x_NH)
    for expert, choices_G in zip(experts.members, choices_C.split(counts), strict=True):
        count = len(choices_G)
        if count:
            rows_G = choices_G // per_token
            padding = experts.ops.padded(count) - count
            x_GH = x_NH[torch.cat((rows_G, rows_G[:1].expand(padding)))]
            out_GH = expert.down(gated(expert.gate_up(x_GH), model.kernels))[:count]
            sum_NH.index_add_(0, rows_G, out_GH * shares_C[choices_G, None])
    return sum_NH


def gated(gate_up_NI: Tensor, kernels: Kernels | None = None) -> Tensor:
    """``silu(gate) * up``: gate / (1 + exp(-gate)) * up.

    Each of these steps gives a number the same bits wherever threads cut the array.
    torch's own silu does not: measured, a row of 2,560 changes with its neighbours
    at three threads. It is a third faster, which is 0.4 % of a step.
    """
    if kernels is not None:
        return kernels.gated(gate_up_NI)
    gate_NI, up_NI = gate_up_NI.chunk(2, dim=-1)
    if gate_NI.dtype != torch.float32:
        return silu(gate_NI).mul_(up_NI)
    below_NI = gate_NI.neg().exp_().add_(1)
    return torch.div(gate_NI, below_NI, out=below_NI).mul_(up_NI)


def normed(x_NH: Tensor, weight_H: Tensor, eps: float, kernels: Kernels | None = None) -> Tensor:
    """Root-mean-square norm, in fp32."""
    if kernels is not None:
        return kernels.norm(x_NH, weight_H, eps)
    wide_NH = x_NH.float()
    scaled_NH = wide_NH * wide_NH.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return scaled_NH.to(x_NH.dtype).mul_(weight_H)
