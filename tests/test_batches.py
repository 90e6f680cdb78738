"""What crosses from algorithms to the trainer cannot be built wrong."""

from __future__ import annotations

import dataclasses
import math
from array import array
from typing import Any

import pytest

from palestra.batches import Batch, LossSpec


def batch(**changes: Any) -> Batch:
    columns: dict[str, Any] = {
        "tokens_T": [5, 6, 7, 8, 9],
        "positions_T": [0, 1, 2, 2, 3],
        "segment_ids_T": [0, 0, 1, 2, 2],
        "segment_parents_S": [-1, 0, 0],
        "predictors_N": [1, 1, 3],
        "targets_N": [7, 8, 9],
        "weights_N": [0.5, -0.5, -0.5],
        "sampler_logprobs_N": [-1.0, -2.0, -0.1],
        "sequence_ids_N": [0, 1, 1],
    }
    return Batch(**{**columns, **changes})


def test_a_batch_of_agreeing_columns_is_built() -> None:
    assert (batch().token_count, batch().target_count) == (5, 3)
    assert batch(old_logprobs_N=[-1.0, -2.0, -3.0]).old_logprobs_N is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions_T": [0, 1]}, "one length"),
        ({"tokens_T": [], "positions_T": [], "segment_ids_T": []}, "no token"),
        ({"segment_ids_T": [0, 0, 2, 1, 1]}, "after segment 0"),
        ({"segment_ids_T": [0, 0, 1, 1, 1]}, "3 segments declared, 2 hold tokens"),
        ({"segment_parents_S": [-1, 1, 0]}, "not an earlier one"),
        ({"segment_parents_S": [-1, 0, 3]}, "not an earlier one"),
        ({"predictors_N": [1, 1, 5]}, "outside"),
        ({"targets_N": [7, 8]}, "one length"),
        ({"weights_N": [0.5, math.inf, 0.0]}, "weight is not finite"),
        ({"sampler_logprobs_N": [math.nan, 0.0, 0.0]}, "sampler logprob"),
        ({"old_logprobs_N": [0.0]}, "old_logprobs_N has another length"),
        ({"ref_logprobs_N": [0.0] * 4}, "ref_logprobs_N has another length"),
        ({"kl_weights_N": []}, "kl_weights_N has another length"),
        ({"old_logprobs_N": [0.0, math.nan, 0.0]}, "old_logprobs_N is not finite"),
        ({"ref_logprobs_N": [0.0, -math.inf, 0.0]}, "ref_logprobs_N is not finite"),
        ({"temperature": 0.0}, "temperature"),
    ],
)
def test_a_batch_of_disagreeing_columns_cannot_be_built(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch(**changes)


def test_columns_are_kept_as_arrays_of_the_declared_types() -> None:
    made = batch(kl_weights_N=[1, 2, 3], ref_logprobs_N=(-1.0, -2.0, -3.0))
    assert made.kl_weights_N == array("f", [1, 2, 3])
    assert made.ref_logprobs_N == array("f", [-1, -2, -3])
    assert (made.tokens_T.typecode, made.weights_N.typecode) == ("q", "f")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "magic"}, "loss kind must be one of policy, cispo, sapo, nll, got 'magic'"),
        ({"clip_low": 1.1}, "clip_low"),
        ({"clip_low": -0.1}, "clip_low"),
        ({"clip_high": -1.0}, "clip_high"),
        ({"clip_high": math.inf}, "clip_high"),
        ({"ratio": "group"}, "ratio must be one of token, sequence, product"),
        ({"kind": "cispo", "ratio": "sequence"}, "cispo has a ratio per token only"),
        ({"kind": "nll", "ratio": "product"}, "nll has a ratio per token only"),
        ({"dual_clip": 1.1}, "dual_clip must be 0 or at least 1"),
        ({"dual_clip": math.nan}, "dual_clip"),
        ({"temperature_positive": 0.0}, "temperature_positive"),
        ({"temperature_negative": math.inf}, "temperature_negative"),
        ({"kl_coef": -1.0}, "kl_coef"),
        ({"kl_coef": math.nan}, "kl_coef"),
        ({"kl": "k4"}, "kl must be one of k1, k2, k3, k3+"),
    ],
)
def test_a_loss_out_of_range_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossSpec(**arguments)


def test_a_batch_and_a_loss_are_frozen() -> None:
    for made in (batch(), LossSpec()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, dataclasses.fields(made)[0].name, 1)
