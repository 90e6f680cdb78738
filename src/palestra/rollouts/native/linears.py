"""Matrix products with weights: prepacked for oneDNN where that works, plain otherwise.

A row of the result must not depend on which other rows are computed beside it:
only then do a request's tokens not depend on the other requests. Prepacked fp32
products keep that for every row count and thread count measured; plain ones keep
it when rows come in multiples of four per thread, so they are padded to that.
Which kind is used follows from the type and a functional probe, never from a
timing: two starts of one job must compute the same bits.

Why prepacked (2 cores with AVX2, fp32, 576 x 49152): 25.1 against 63.9 ms at 16
rows, 61.3 against 111.9 at 64; with AMX in bf16, 35.0 against 55.7 ms for a
whole step of 64 rows, but 55.9 against 40.9 for a single row, which two rows
avoid (26.9 ms).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

CPU = torch.device("cpu")
PACK_ROWS = 64
"""The row count the packed layout is tuned for; any other number works with it."""


class PackedLinear:
    """``x @ weight.T`` from a oneDNN-reordered copy of the weight."""

    def __init__(self, dense_OI: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(dense_OI, PACK_ROWS)

    def __call__(self, x_NI: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x_NI, self._packed, None, "none", [], "")


class DenseLinear:
    """``x @ weight.T`` from the weight as it lies in its buffer."""

    def __init__(self, dense_OI: Tensor) -> None:
        self._weight_OI = dense_OI

    def __call__(self, x_NI: Tensor) -> Tensor:
        return linear(x_NI, self._weight_OI)


class BiasedLinear:
    """A product and a bias, added apart: that changes no row's independence."""

    def __init__(self, product: PackedLinear | DenseLinear, bias_O: Tensor) -> None:
        self._product = product
        self._bias_O = bias_O

    def __call__(self, x_NI: Tensor) -> Tensor:
        return self._product(x_NI).add_(self._bias_O)


Linear = PackedLinear | DenseLinear | BiasedLinear


@dataclass(frozen=True, slots=True)
class LinearOps:
    """The kind of linear an engine uses, on which device, and the row counts that kind wants."""

    dtype: torch.dtype
    packed: bool
    threads: int = 1
    device: torch.device = CPU

    @classmethod
    def best(cls, dtype: torch.dtype, threads: int, device: torch.device = CPU) -> LinearOps:
        return cls(dtype, device.type == "cpu" and packing_works(dtype), threads, device)

    def make(self, dense_OI: Tensor) -> PackedLinear | DenseLinear:
        """The product with ``dense_OI``, which lies on this device."""
        return PackedLinear(dense_OI) if self.packed else DenseLinear(dense_OI)

    def padded(self, rows: int) -> int:
        """How many rows to compute where ``rows`` are needed."""
        if self.device.type != "cpu":
            return rows
        if self.dtype != torch.float32:
            return max(rows, 2)
        if self.packed:
            return rows
        multiple = 4 * self.threads
        return -(-rows // multiple) * multiple


@cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether the prepacked product exists here for ``dtype`` and gives the right numbers.

    The operators are private to torch, so they are tried, not assumed. In bf16 they
    also need hardware for it: emulation would be slower than the plain product.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    with torch.inference_mode():
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(96, 64, generator=generator).to(dtype)
        x = torch.randn(9, 64, generator=generator).to(dtype)
        try:
            if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
                return False
            packed = PackedLinear(weight)
            full = packed(x)
            few = packed(x[:3].contiguous())
        except (AttributeError, RuntimeError, TypeError):
            return False
        close = torch.allclose(full.float(), linear(x.float(), weight.float()), rtol=2e-2, atol=1e-1)
        exact = dtype != torch.float32 or torch.equal(full[:3], few)
        return bool(close and exact)
