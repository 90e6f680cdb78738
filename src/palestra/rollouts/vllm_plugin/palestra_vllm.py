"""What runs inside vLLM's workers: one method more, which loads a version from a file.

vLLM mixes the class into its worker (``--worker-extension-cls``); the folder of this
file is on the server's path, so it imports nothing of palestra. Nothing of vLLM is
replaced: ``reload_weights`` is the worker's own and knows how the linear weights are
packed. What was loaded is proven from outside, by probe logprobs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class PalestraWorker:
    """Called by name through ``/collective_rpc``, on every worker."""

    reload_weights: Any
    """The worker's own method: this class is one of its bases."""

    def palestra_load(self, path: str) -> dict[str, int]:
        """Replace the weights by those of one safetensors file, under Hugging Face names."""
        from safetensors import safe_open

        loaded = 0

        def tensors() -> Iterator[tuple[str, Tensor]]:
            nonlocal loaded
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    yield name, file.get_tensor(name)
                    loaded += 1

        self.reload_weights(weights_iterator=tensors())
        return {"tensors": loaded}
