"""Manifests made from real tensors: what a publisher announces before it sends them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from palestra.models.tensors import entry_of
from palestra.types import Manifest, Version


def full_manifest(version: Version, tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
    """A full manifest of ``tensors``. Raises ValueError if a name occurs twice."""
    return Manifest(version, "full", None, tuple(entry_of(name, tensor) for name, tensor in tensors))
