"""What a trainer computes with: a causal model over packed tokens, and the fp32 masters behind it.

A network turns packed tokens into final normed hidden states, and hidden states
times ``head_weight`` are the model's logits, nothing in between. Which token sees
which is the plan's affair. ``masters`` is all that an update changes; ``weights``
is what everyone else gets: the whole model under the names of its own files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from palestra.errors import TrainerError
from palestra.models.config import ModelConfig, read_json
from palestra.models.dtypes import TORCH_DTYPES
from palestra.models.llama import Llama
from palestra.models.tensors import load_tensors
from palestra.trainer.low_rank import LowRankModules
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.tree_attention import TreeAttention


class Network(Protocol):
    vocab_size: int
    """Rows of ``head_weight``."""
    masters: dict[str, Tensor]
    """What is trained: fp32 leaves, in a stable order."""
    source_dtypes: dict[str, torch.dtype]
    """Of the model's files, by the names of ``weights``."""
    low_rank: LowRankModules | None
    """The adapters, where only they are trained."""

    @property
    def head_weight(self) -> Tensor:
        """[vocabulary, hidden]; it requires a gradient if it is among the masters."""
        ...

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, plan: TreeAttention, again: bool) -> Tensor:
        """Final normed hidden states [T, hidden], in the compute dtype.

        ``again``: only each layer's input is kept for the backward pass, which computes the layer again.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model as its files name it, adapters merged in; tied weights once."""
        ...

    def frozen(self) -> list[Tensor]:
        """Weights that no update changes."""
        ...


class OwnNetwork:
    """Our own Llama: nothing to install, and an eighth less memory than the general way at its peak."""

    def __init__(self, folder: Path, settings: TrainerSettings) -> None:
        config = ModelConfig.from_folder(folder)
        tensors = load_tensors(folder)
        self.source_dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        self.vocab_size = config.vocab_size
        self._model = Llama.from_tensors(config, tensors, TORCH_DTYPES[settings.dtype])
        self._model.to(settings.device)
        self.masters: dict[str, Tensor] = dict(self._model.named_parameters())
        self.low_rank: LowRankModules | None = None

    @property
    def head_weight(self) -> Tensor:
        return self._model.head_weight

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, plan: TreeAttention, again: bool) -> Tensor:
        self._model.checkpoint_layers = again
        return self._model(tokens_T, positions_T, plan)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(tuple(self.masters.items()))

    def frozen(self) -> list[Tensor]:
        return []


def load_network(folder: Path, settings: TrainerSettings) -> Network:
    """The network that trains ``folder``'s model; ModelSourceError or TrainerError where none can."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise TrainerError(
            "torch finds no CUDA device on this machine",
            where="trainer.device",
            expected="a CUDA device and its driver, or cpu",
            next_command="palestra doctor",
        )
    raw = read_json(folder / "config.json")
    plain = raw.get("architectures") == ["LlamaForCausalLM"]
    if plain and not settings.lora_rank and not ModelConfig.from_folder(folder).beyond_llama():
        return OwnNetwork(folder, settings)
    from palestra.trainer.hf_network import HfNetwork  # transformers takes seconds to import

    return HfNetwork(folder, settings)
