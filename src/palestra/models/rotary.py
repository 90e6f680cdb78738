"""Rotary positions in the Hugging Face layout: one definition for training and decoding.

Element i of the first half of a head and element i of the second rotate together.
Rotating by the negative angle undoes it, and is also the rotation's gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from palestra.models.config import ModelConfig


def rotary_tables(config: ModelConfig, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines [T, 1, head_dim] and sines [T, 1, head_dim / 2] of every position's angles."""
    angles_TF = positions_T.to(torch.float32)[:, None] * _frequencies(config, positions_T.device)
    cos_TD = torch.cat((angles_TF.cos(), angles_TF.cos()), dim=-1)
    return cos_TD[:, None].to(dtype), angles_TF.sin()[:, None].to(dtype)


def _frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Radians per position of each pair, scaled as the model asks."""
    half_F = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    plain_F = 1.0 / config.rope_theta**half_F
    scaling = config.rope_scaling
    if scaling is None:
        return plain_F
    if scaling.kind == "linear":
        return plain_F / scaling.factor
    # llama3: pairs that turn often within the original context stay, those that hardly turn are slowed
    turns_F = scaling.original_positions * plain_F / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept_F = ((turns_F - scaling.low_freq_factor) / span).clamp(0, 1)
    return plain_F * kept_F + plain_F / scaling.factor * (1 - kept_F)


def rotated(x_TXD: Tensor, cos_T1D: Tensor, sin_T1F: Tensor) -> Tensor:
    """``x`` turned by the angles: (left cos - right sin, right cos + left sin)."""
    half = sin_T1F.shape[-1]
    turned_TXD = x_TXD * cos_T1D
    turned_TXD[..., :half].addcmul_(x_TXD[..., half:], sin_T1F, value=-1)
    turned_TXD[..., half:].addcmul_(x_TXD[..., :half], sin_T1F)
    return turned_TXD
