"""Taking a version's tensors: every name, shape and byte is accounted for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from palestra.errors import WeightsError
from palestra.rollouts.native import forward
from palestra.rollouts.native.layers import Model
from palestra.rollouts.native.linears import LinearOps, PackedLinear, packing_works
from palestra.rollouts.native.weights import Weights, load, plan
from palestra.types import Manifest
from rollouts.support import Tiny, manifest_of

PACKED = packing_works(torch.float32)


def take(tiny: Tiny, tensors: dict[str, Tensor], manifest: Manifest | None = None) -> tuple[Weights, str]:
    ops = LinearOps(torch.float32, PACKED, 1)
    return load(tiny.config, ops, manifest or manifest_of(tensors), tensors.items())


def logits_of(tiny: Tiny, weights: Weights) -> Tensor:
    model = Model.build(tiny.config, LinearOps(torch.float32, PACKED, 1), 64)
    return forward.logits(model, weights, forward.whole(model, weights, [5, 6, 7]))


def test_the_digest_is_that_of_the_manifest_in_whatever_order_the_tensors_come(tiny: Tiny) -> None:
    manifest = manifest_of(tiny.tensors)
    forwards, digest = take(tiny, tiny.tensors)
    backwards, reverse_digest = take(tiny, dict(reversed(tiny.tensors.items())))
    assert digest == reverse_digest == manifest.digest
    assert torch.equal(logits_of(tiny, forwards), logits_of(tiny, backwards))


def test_one_changed_bit_is_refused_by_the_tensor_it_is_in(tiny: Tiny) -> None:
    """verl#7495: the engine proves what it loaded from the bytes it received."""
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = {name: t.clone() for name, t in tiny.tensors.items()}
    flipped = tensors[name].view(torch.int32)
    flipped[3, 4] ^= 1
    with pytest.raises(WeightsError, match=f"the bytes received for {name} are not those") as caught:
        take(tiny, tensors, manifest_of(tiny.tensors))
    assert "'F32', shape=(64, 32)" in caught.value.expected
    assert take(tiny, tensors)[1] == manifest_of(tensors).digest


def test_a_type_or_a_tensor_that_was_not_announced_is_refused(tiny: Tiny) -> None:
    """The same values in another number type are other bytes."""
    halves = {name: t.to(torch.bfloat16) for name, t in tiny.tensors.items()}
    with pytest.raises(WeightsError, match=r"model\.embed_tokens\.weight are not those"):
        take(tiny, tiny.tensors, manifest_of(halves))
    fewer = {name: t for name, t in tiny.tensors.items() if name != "model.norm.weight"}
    with pytest.raises(WeightsError, match=r"model\.norm\.weight are not those"):
        take(tiny, tiny.tensors, manifest_of(fewer))
    more = tiny.tensors | {"model.extra.weight": torch.ones(2)}
    with pytest.raises(WeightsError, match=r"model\.extra\.weight are not those"):
        take(tiny, tiny.tensors, manifest_of(more))


def test_a_digest_covers_the_bytes_received_not_the_bytes_computed_with(tiny: Tiny) -> None:
    halves = {name: t.to(torch.bfloat16) for name, t in tiny.tensors.items()}
    weights, digest = take(tiny, halves)
    assert digest == manifest_of(halves).digest
    assert weights.embedding_VH.dtype == torch.float32
    widened, _ = take(tiny, {name: t.float() for name, t in halves.items()})
    assert torch.equal(logits_of(tiny, weights), logits_of(tiny, widened))


def test_tensors_that_are_not_contiguous_or_carry_gradients_are_taken_as_their_values(tiny: Tiny) -> None:
    tensors = {
        name: (t.t().contiguous().t() if t.dim() == 2 else t.clone()).requires_grad_()
        for name, t in tiny.tensors.items()
    }
    assert take(tiny, tensors)[1] == manifest_of(tiny.tensors).digest


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("model.layers.0.self_attn.q_project.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("lm_head.weight", "model.embed_tokens.weight"),
    ],
)
def test_an_unknown_tensor_is_refused_with_the_nearest_name(tiny: Tiny, name: str, nearest: str) -> None:
    with pytest.raises(WeightsError, match="no tensor named") as caught:
        take(tiny, tiny.tensors | {name: torch.zeros(32, 32)}, manifest_of(tiny.tensors))
    assert caught.value.nearest == nearest


def test_a_missing_tensor_is_refused_by_name(tiny: Tiny) -> None:
    tensors = dict(tiny.tensors)
    del tensors["model.layers.1.self_attn.v_proj.weight"]
    with pytest.raises(
        WeightsError, match=r"1 of \d+ tensors are missing, first model.layers.1.self_attn.v_proj"
    ):
        take(tiny, tensors)


def test_a_tensor_of_another_shape_is_refused_with_both_shapes(tiny: Tiny) -> None:
    tensors = tiny.tensors | {"model.norm.weight": torch.ones(33)}
    with pytest.raises(WeightsError, match=r"model.norm.weight has shape \[33\]") as caught:
        take(tiny, tensors)
    assert "[32]" in caught.value.expected


def test_a_tensor_given_twice_or_of_a_strange_type_is_refused(tiny: Tiny) -> None:
    manifest = manifest_of(tiny.tensors)
    pairs = [*tiny.tensors.items(), ("model.norm.weight", torch.ones(32))]
    with pytest.raises(WeightsError, match="given twice"):
        load(tiny.config, LinearOps(torch.float32, PACKED, 1), manifest, pairs)
    for strange in (torch.int8, torch.int64, torch.float8_e4m3fn):
        tensors = tiny.tensors | {"model.norm.weight": torch.ones(32).to(strange)}
        with pytest.raises(WeightsError, match=str(strange)) as caught:
            take(tiny, tensors, manifest)
        assert caught.value.expected == "one of F64, F32, BF16, F16"


def test_an_untied_head_has_its_own_tensor(tiny: Tiny) -> None:
    config = replace(tiny.config, tied_embeddings=False)
    assert set(plan(config)) - set(plan(tiny.config)) == {"lm_head.weight"}
    with pytest.raises(WeightsError, match=r"lm_head\.weight"):
        load(config, LinearOps(torch.float32, PACKED, 1), manifest_of(tiny.tensors), tiny.tensors.items())


def test_an_error_in_the_source_of_tensors_passes_through(tiny: Tiny) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from list(tiny.tensors.items())[:3]
        raise OSError("the connection is gone")

    with pytest.raises(OSError, match="the connection is gone"):
        load(tiny.config, LinearOps(torch.float32, PACKED, 1), manifest_of(tiny.tensors), broken())


@pytest.mark.skipif(not PACKED, reason="no prepacked products here")
@pytest.mark.parametrize("rows", [1, 2, 3, 17, 64, 200])
def test_a_prepacked_product_equals_the_plain_one_for_every_row_count(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(96, 64, generator=generator), torch.randn(rows, 64, generator=generator)
    assert torch.allclose(PackedLinear(weight)(x), x @ weight.T, atol=1e-4)
