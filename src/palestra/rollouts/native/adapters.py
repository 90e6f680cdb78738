"""LoRA adapters beside the weights: which rows use which, and what that adds to a layer's products.

An adapter is prepared once, in the fused layout of the weights it changes: all it
adds to one product is two small products. Rows are grouped by adapter, so a row's
numbers depend neither on the rows beside it nor on their adapters (fp32, see
`linears`), and a row without an adapter computes exactly what it would alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from palestra.errors import WeightsError
from palestra.models.config import ModelConfig
from palestra.models.lora import LowRank, parse_adapter
from palestra.rollouts.native.linears import Linear, LinearOps
from palestra.rollouts.native.weights import Part, plan


@dataclass(frozen=True, slots=True)
class Delta:
    """What is added to one fused product: ``up(down(x))``, the scale within ``up``."""

    down: Linear
    up: Linear


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter, ready to compute with; ``deltas`` by the key of the fused weight (see `weights.Part`)."""

    ops: LinearOps
    deltas: Mapping[str, Delta]

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        ops: LinearOps,
        spec: Mapping[str, Any],
        tensors: Iterable[tuple[str, Tensor]],
    ) -> Adapter:
        """From PEFT's ``adapter_config.json`` and tensors; WeightsError where they do not fit the model."""
        parts = plan(config)
        changes = parse_adapter(spec, tensors, {name: part.shape for name, part in parts.items()})
        rows: dict[str, int] = {}
        for part in parts.values():
            rows[part.key] = rows.get(part.key, 0) + part.shape[0]
        fused: dict[str, list[tuple[Part, LowRank]]] = {}
        for name, change in changes.items():
            fused.setdefault(parts[name].key, []).append((parts[name], change))
        return cls(ops, {key: _delta(ops, rows[key], members) for key, members in fused.items()})


def _delta(ops: LinearOps, rows: int, members: Sequence[tuple[Part, LowRank]]) -> Delta:
    """The changes of one fused weight's parts, each in the rows of its part."""
    down_RI = torch.cat([change.down_RI.float() for _, change in members]).to(ops.device)
    up_OR = torch.zeros(rows, down_RI.shape[0], device=ops.device)
    rank = 0
    for part, change in members:
        block = change.up_OR.float() * change.scale
        up_OR[part.first_row : part.first_row + part.shape[0], rank : rank + block.shape[1]] = block
        rank += block.shape[1]
    if not (down_RI.isfinite().all() and up_OR.isfinite().all()):
        raise WeightsError(
            "the adapter holds numbers that are not finite",
            where="the LoRA adapter",
            expected="finite matrices and a finite lora_alpha: its training may have diverged",
        )
    return Delta(ops.make(down_RI.to(ops.dtype)), ops.make(up_OR.to(ops.dtype)))


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """The adapters of the rows of one batch: for each adapter, which rows use it."""

    groups: tuple[tuple[Adapter, Tensor, int], ...]
    """Adapter, its rows (the first one again, up to a count that products want), and how many they are."""

    @classmethod
    def build(cls, names: Sequence[str], loaded: Mapping[str, Adapter]) -> RowAdapters | None:
        """Row i uses the adapter ``names[i]``, or none where that is empty. None if no row uses one."""
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            if name:
                rows.setdefault(name, []).append(row)
        groups: list[tuple[Adapter, Tensor, int]] = []
        for name, at in rows.items():
            adapter = loaded[name]
            ops = adapter.ops
            padded = [*at, *at[:1] * (ops.padded(len(at)) - len(at))]
            groups.append((adapter, torch.tensor(padded, device=ops.device), len(at)))
        return cls(tuple(groups)) if groups else None

    def add(self, key: str, x_NI: Tensor, y_NO: Tensor) -> None:
        """To ``y``, the weight ``key``'s product with ``x``, add what each row's adapter adds."""
        for adapter, rows_G, count in self.groups:
            delta = adapter.deltas.get(key)
            if delta is None:
                continue
            if count == len(x_NI):  # every row: in order, nothing to gather
                y_NO.add_(delta.up(delta.down(x_NI)))
            else:
                added_GO = delta.up(delta.down(x_NI.index_select(0, rows_G)))
                y_NO.index_add_(0, rows_G[:count], added_GO[:count])
