"""A Llama decoder as a differentiable module over packed tokens; parameter names are Hugging Face's.

The module knows nothing of batches: it runs every linear layer over one packed
run of tokens and leaves to the caller's ``attend`` which token sees which. It
returns final hidden states; the vocabulary-wide head is the caller's, because
only it knows which rows predict something. Parameters are the fp32 masters;
``compute_dtype`` is what the matrix products run in, and the residual stream
and the norms stay fp32. A backward pass adds to the parameters' ``grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from palestra.errors import ModelSourceError
from palestra.models.config import ModelConfig
from palestra.models.functions import GatedDown, Lookup, Project, RmsNorm, Rotate
from palestra.models.rotary import rotary_tables

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(queries [T, heads, D], keys [T, kv_heads, D], values [T, kv_heads, D]) -> [T, heads, D]."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class Llama(nn.Module):
    """``forward`` gives the normed hidden state of every packed token.

    Raises ModelSourceError for a family that computes more than this.
    """

    def __init__(self, config: ModelConfig, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        beyond = config.beyond_llama()
        if beyond:
            raise ModelSourceError(
                f"{config.architecture} with {', '.join(beyond)} is not computed by this forward pass",
                expected="a plain Llama to train",
            )
        self.config = config
        self.compute_dtype = compute_dtype
        self.checkpoint_layers = False
        """Keep only each layer's input for the backward pass, and compute the layer again."""
        self.model = _Body(config)
        if not config.tied_embeddings:
            self.lm_head = _Weight(config.vocab_size, config.hidden_size)

    @property
    def head_weight(self) -> nn.Parameter:
        """The [vocabulary, hidden] matrix that turns hidden states into logits."""
        return self.model.embed_tokens.weight if self.config.tied_embeddings else self.lm_head.weight

    @classmethod
    def from_tensors(
        cls, config: ModelConfig, tensors: Mapping[str, Tensor], compute_dtype: torch.dtype = torch.float32
    ) -> Llama:
        """A module whose fp32 parameters are copies of ``tensors``.

        Raises ModelSourceError where a tensor is missing, unknown or has another shape.
        A tied model may carry the head's tensor too: it is not read.
        """
        with torch.device("meta"):
            module = cls(config, compute_dtype)
        parameters = dict(module.named_parameters())
        extra = {HEAD} if config.tied_embeddings else set[str]()
        for name in sorted(parameters.keys() ^ (tensors.keys() - extra)):
            if not name.endswith("rotary_emb.inv_freq"):  # a buffer that old exports still carry
                known = name in parameters
                raise ModelSourceError(
                    f"the model lacks the tensor {name}"
                    if known
                    else f"the model has an unknown tensor {name}",
                    expected=f"the {len(parameters)} tensors of a {config.architecture}",
                )
        for name, parameter in parameters.items():
            if parameter.shape != tensors[name].shape:
                raise ModelSourceError(
                    f"the tensor {name} has shape {list(tensors[name].shape)}",
                    expected=f"{list(parameter.shape)}, from config.json",
                )
        masters = {name: tensors[name].to(torch.float32, copy=True) for name in parameters}
        module.load_state_dict(masters, assign=True)
        return module

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Final hidden states [T, hidden], in the compute dtype."""
        hidden: Tensor = Lookup.apply(self.model.embed_tokens.weight, tokens_T)  # type: ignore[assignment]
        cos, sin = rotary_tables(self.config, positions_T, self.compute_dtype)
        for layer in self.model.layers:
            if self.checkpoint_layers and torch.is_grad_enabled():
                hidden = checkpoint(
                    layer, hidden, cos, sin, attend, use_reentrant=False, preserve_rng_state=False
                )
            else:
                hidden = layer(hidden, cos, sin, attend)
        return self.model.norm(hidden).to(self.compute_dtype)


class _Weight(nn.Module):
    """A matrix without a bias, under the name ``weight``."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))


def _project(x: Tensor, *matrices: _Weight) -> tuple[Tensor, ...]:
    """``x`` times each matrix, with one gradient of ``x`` for all of them."""
    return Project.apply(x, *(matrix.weight for matrix in matrices))  # type: ignore[return-value]


class _Norm(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size))
        self.epsilon = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return RmsNorm.apply(x, self.weight, self.epsilon)  # type: ignore[return-value]  # untyped in torch


class _Body(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = _Weight(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        self.norm = _Norm(config)


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = _Norm(config)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = _Norm(config)
        self.mlp = _Mlp(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden).to(cos.dtype), cos, sin, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden).to(cos.dtype))


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = _Weight(config.heads * config.head_dim, config.hidden_size)
        self.k_proj = _Weight(config.kv_heads * config.head_dim, config.hidden_size)
        self.v_proj = _Weight(config.kv_heads * config.head_dim, config.hidden_size)
        self.o_proj = _Weight(config.hidden_size, config.heads * config.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        split = (len(x), -1, self.head_dim)
        queries, keys, values = _project(x, self.q_proj, self.k_proj, self.v_proj)
        queries = Rotate.apply(queries.view(split), cos, sin)
        keys = Rotate.apply(keys.view(split), cos, sin)
        return _project(attend(queries, keys, values.view(split)).reshape(len(x), -1), self.o_proj)[0]


class _Mlp(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = _Weight(config.intermediate_size, config.hidden_size)
        self.up_proj = _Weight(config.intermediate_size, config.hidden_size)
        self.down_proj = _Weight(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = _project(x, self.gate_proj, self.up_proj)
        return GatedDown.apply(gate, up, self.down_proj.weight)  # type: ignore[return-value]
