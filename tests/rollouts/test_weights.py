"""Taking a version's tensors: every name, shape and byte is accounted for, and buffers are reused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from palestra.errors import WeightsError
from palestra.rollouts.native import forward
from palestra.rollouts.native.forward import Model
from palestra.rollouts.native.linears import LinearOps, PackedLinear, packing_works
from palestra.rollouts.native.weights import Weights, load, plan
from rollouts.support import Tiny, manifest_of

PACKED = packing_works(torch.float32)


def take(
    tiny: Tiny, tensors: dict[str, Tensor], store: dict[str, Tensor] | None = None, packed: bool = PACKED
) -> tuple[Weights, str]:
    ops = LinearOps(torch.float32, packed, 1)
    store = {} if store is None else store
    return load(tiny.config, ops, manifest_of(tiny.tensors), tensors.items(), store)


def logits_of(tiny: Tiny, weights: Weights, packed: bool = PACKED) -> Tensor:
    model = Model.build(tiny.config, LinearOps(torch.float32, packed, 1), 64)
    return forward.logits(model, weights, forward.prompts(model, weights, [[5, 6, 7]]))


def test_the_digest_is_that_of_the_manifest_in_whatever_order_the_tensors_come(tiny: Tiny) -> None:
    manifest = manifest_of(tiny.tensors)
    forwards, digest = take(tiny, tiny.tensors)
    backwards, reverse_digest = take(tiny, dict(reversed(tiny.tensors.items())))
    assert digest == reverse_digest == manifest.digest
    assert torch.equal(logits_of(tiny, forwards), logits_of(tiny, backwards))


def test_one_changed_bit_changes_the_digest(tiny: Tiny) -> None:
    """verl#7495: the engine proves what it loaded from the bytes it received."""
    tensors = {name: t.clone() for name, t in tiny.tensors.items()}
    flipped = tensors["model.layers.1.mlp.up_proj.weight"].view(torch.int32)
    flipped[3, 4] ^= 1
    assert take(tiny, tensors)[1] != manifest_of(tiny.tensors).digest
    assert take(tiny, tensors)[1] == manifest_of(tensors).digest


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
        take(tiny, tiny.tensors | {name: torch.zeros(32, 32)})
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
    pairs = [*tiny.tensors.items(), ("model.norm.weight", torch.ones(32))]
    ops = LinearOps(torch.float32, PACKED, 1)
    with pytest.raises(WeightsError, match="given twice"):
        load(tiny.config, ops, manifest_of(tiny.tensors), pairs, {})
    with pytest.raises(WeightsError, match=r"torch\.int8"):
        take(tiny, tiny.tensors | {"model.norm.weight": torch.ones(32, dtype=torch.int8)})


@pytest.mark.parametrize("packed", [False, *([True] if PACKED else [])])
def test_buffers_are_allocated_once_and_used_again(tiny: Tiny, packed: bool) -> None:
    """Fresh memory costs ten times a copy at first touch, and a third version must never be alive."""
    store: dict[str, Tensor] = {}
    take(tiny, tiny.tensors, store, packed)
    places = {key: tensor.data_ptr() for key, tensor in store.items()}
    weights, _ = take(tiny, tiny.changed(), store, packed)
    assert {key: tensor.data_ptr() for key, tensor in store.items()} == places
    expected, _ = take(tiny, tiny.changed(), {}, packed)
    assert torch.equal(logits_of(tiny, weights, packed), logits_of(tiny, expected, packed))


def test_weights_count_the_bytes_they_hold(tiny: Tiny) -> None:
    total = sum(t.nbytes for t in tiny.tensors.values())
    embedding = tiny.tensors["model.embed_tokens.weight"].nbytes
    assert take(tiny, tiny.tensors, packed=False)[0].nbytes == total
    if PACKED:  # the tied head is a packed copy of the embedding
        assert take(tiny, tiny.tensors, packed=True)[0].nbytes == total + embedding


def test_an_untied_head_has_its_own_tensor(tiny: Tiny) -> None:
    config = replace(tiny.config, tied_embeddings=False)
    assert set(plan(config)) - set(plan(tiny.config)) == {"lm_head.weight"}
    with pytest.raises(WeightsError, match=r"lm_head\.weight"):
        load(config, LinearOps(torch.float32, PACKED, 1), manifest_of(tiny.tensors), tiny.tensors.items(), {})


def test_an_error_in_the_source_of_tensors_passes_through(tiny: Tiny) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from list(tiny.tensors.items())[:3]
        raise OSError("the connection is gone")

    with pytest.raises(OSError, match="the connection is gone"):
        load(tiny.config, LinearOps(torch.float32, PACKED, 1), manifest_of(tiny.tensors), broken(), {})


@pytest.mark.skipif(not PACKED, reason="no prepacked products here")
@pytest.mark.parametrize("rows", [1, 2, 3, 17, 64, 200])
def test_a_prepacked_product_equals_the_plain_one_for_every_row_count(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(96, 64, generator=generator), torch.randn(rows, 64, generator=generator)
    assert torch.allclose(PackedLinear(weight)(x), x @ weight.T, atol=1e-4)
