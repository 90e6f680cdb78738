"""Manifests made from real tensors: the digest is of the bytes, never of a name or a counter.

One function turns tensors into entries, whoever holds them, so a publisher's
manifest and an engine's receipt can be compared digest by digest. Tensors are
read in row-major order; no tensor is copied unless it is not contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

from palestra.types import Manifest, TensorEntry, Version

DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
"""torch dtype to the name safetensors gives it."""


def tensor_digest(tensor: Tensor) -> str:
    """32 hex digits of XXH3-128 over the tensor's bytes in row-major order."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(flat.numpy().data)


def entry_of(name: str, tensor: Tensor) -> TensorEntry:
    nbytes = tensor.numel() * tensor.element_size()
    return TensorEntry(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), nbytes, tensor_digest(tensor))


def full_manifest(version: Version, tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
    """A full manifest of ``tensors``. Raises ValueError if a name occurs twice."""
    return Manifest(version, "full", None, tuple(entry_of(name, tensor) for name, tensor in tensors))
