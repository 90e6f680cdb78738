"""What runs inside vLLM's workers: one method more, which loads a version from a file.

vLLM mixes the class into its worker (``--worker-extension-cls``); the folder of this
file is on the server's path, so it imports nothing of palestra. Nothing of vLLM is
replaced: ``reload_weights`` and the repacking of a layer are its own, and know how weights
are packed. What was loaded is proven from outside, by probe logprobs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class PalestraWorker:
    """Called by name through ``/collective_rpc``, on every worker."""

    reload_weights: Any
    get_model: Any
    """The worker's own methods: this class is one of its bases."""

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
        self._repack_tied_heads()
        return {"tensors": loaded}

    def _repack_tied_heads(self) -> None:
        """A head tied to the embedding has no tensor in the file, so vLLM 0.32 does not process it again.

        On a CPU it multiplies by a packed copy of its own: the new weights would serve everywhere
        but in the last product, without a word.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
            ParallelLMHead,
            UnquantizedEmbeddingMethod,
        )

        for module in self.get_model().modules():
            if isinstance(module, ParallelLMHead):
                method = module.quant_method
                if isinstance(method, UnquantizedEmbeddingMethod):
                    method.process_weights_after_loading(module)
