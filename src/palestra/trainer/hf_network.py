"""Any causal model that transformers computes, over packed tokens, and proven to be so.

The model's own classes run unchanged: a registered attention function hands its
queries, keys and values to the forest's plan, positions are given, there is no
cache. Whether that is the same model is not assumed. At load, packed sequences
with a shared prompt must give the logits that the model itself gives for each
sequence alone: a family that scales its logits, keeps a state between tokens or
masks attention in a way of its own is refused, not trained a little wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from palestra.batches import Batch
from palestra.errors import MissingExtraError, ModelSourceError, TrainerError
from palestra.models.dtypes import TORCH_DTYPES
from palestra.models.lora import merged
from palestra.models.tensors import DTYPE_NAMES, weight_files
from palestra.trainer.low_rank import LowRankModules
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.tree_attention import TreeAttention

ATTENTION = "palestra_forest"
_SCALES = ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling")
_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary positions that depend on how long the longest sequence of a batch is."""
_LARGEST_GAP = 1e-4
_MEAN_GAP = 0.05
"""In bf16, as a share of the mean logit."""


class HfNetwork:
    """Implements `palestra.trainer.network.Network` with transformers, the ``hf`` extra."""

    def __init__(self, folder: Path, settings: TrainerSettings) -> None:
        self.source_dtypes = _source_dtypes(folder)
        self._dtype = TORCH_DTYPES[settings.dtype]
        self._device = torch.device(settings.device)
        adapted = settings.lora_rank > 0
        self._model = _load(folder, self._dtype if adapted else torch.float32).to(self._device)
        head = self._model.get_output_embeddings()
        _require_plain(self._model, head, folder)
        self._head: nn.Linear = head
        self.vocab_size = len(head.weight)
        self._model.get_input_embeddings().register_forward_hook(_in_fp32)
        self._layers = _checkpointed_layers(self._model)
        self._prove(folder)
        if settings.checkpoint_layers and not self._layers:
            raise TrainerError(
                "this model cannot compute its layers again", where="trainer.checkpoint_layers"
            )
        self.low_rank: LowRankModules | None = None
        if adapted:
            self._model.requires_grad_(False)
            self.low_rank = LowRankModules(self._model, head, settings)
            self.masters: dict[str, Tensor] = self.low_rank.masters
        else:
            self.masters = dict(self._model.named_parameters())

    @property
    def head_weight(self) -> Tensor:
        return self._head.weight

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, plan: TreeAttention, again: bool) -> Tensor:
        for layer in self._layers:
            layer.training = again  # only this flag: what lies inside (dropout) stays as in evaluation
        narrow = self._dtype != torch.float32
        with torch.autocast(self._device.type, dtype=self._dtype, enabled=narrow):
            output = self._model.base_model(
                input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False, forest=plan
            )
        return output.last_hidden_state[0].to(self._dtype)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        from transformers.core_model_loading import revert_weight_conversion

        once = dict(self._model.named_parameters())
        tied = dict(self._model.named_parameters(remove_duplicate=False)).keys() - once.keys()
        state = {n: t.detach() for n, t in self._model.state_dict().items() if n not in tied}
        tensors = revert_weight_conversion(self._model, state).items()
        if self.low_rank is None:
            return iter(tensors)
        return merged(((name, tensor.float()) for name, tensor in tensors), self.low_rank.changes())

    def frozen(self) -> list[Tensor]:
        return [tensor for tensor in self._model.parameters() if not tensor.requires_grad]

    @torch.no_grad()
    def _prove(self, folder: Path) -> None:
        """TrainerError unless packed sequences get the logits that each alone gets from the model itself."""
        batch, sequences = _probe(self.vocab_size)
        with torch.device(self._device):
            columns = torch.tensor(batch.tokens_T), torch.tensor(batch.positions_T)
            hidden = self.hidden(*columns, TreeAttention(batch), again=False)
            packed_TV = (hidden @ self._head.weight.to(hidden.dtype).t()).float()
            self._model.set_attn_implementation("eager")
            for rows in sequences:
                with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
                    alone = self._model(input_ids=columns[0][rows][None], use_cache=False)
                _compare(packed_TV[rows], alone.logits[0].float(), self._dtype, folder)
        self._model.set_attn_implementation(ATTENTION)


def _attention(
    module: nn.Module,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    _: Tensor | None,
    *,
    forest: TreeAttention | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **__: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: [1, heads, T, D] in, [1, T, heads, D] out."""
    name = type(module).__name__
    if forest is None or softcap is not None or s_aux is not None:
        why = "does not pass its arguments on" if forest is None else "does more than scale and mask"
        raise TrainerError(f"the attention of this model ({name}) {why}: it cannot be trained packed")
    if sliding_window is not None and forest.longest > sliding_window:
        raise TrainerError(
            f"a sequence of {forest.longest} tokens is longer than the model's attention window",
            expected=f"at most {sliding_window} tokens, prompt included",
        )
    packed = (x[0].transpose(0, 1) for x in (queries, keys, values))
    return forest(*packed, scale=scaling)[None], None


def _load(folder: Path, dtype: torch.dtype) -> Any:
    try:
        from transformers import AttentionInterface, AutoModelForCausalLM

        auto: Any = AutoModelForCausalLM
    except ModuleNotFoundError as error:
        raise MissingExtraError("transformers", "hf") from error
    AttentionInterface.register(ATTENTION, _attention)
    try:
        with _quiet():
            model, info = auto.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=ATTENTION,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError) as error:
        raise ModelSourceError(
            f"transformers cannot load the model: {error}",
            where=str(folder),
            expected="a causal language model with an attention function that can be chosen",
        ) from error
    for kind in ("missing_keys", "mismatched_keys"):
        if info[kind]:
            raise ModelSourceError(
                f"the model's files lack {min(map(str, info[kind]))}, or have it in another shape",
                where=str(folder),
            )
    return model.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar of transformers' own: what a run is doing is said once, by the run."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _source_dtypes(folder: Path) -> dict[str, torch.dtype]:
    by_name = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    found: dict[str, torch.dtype] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, "pt") as file:
                kinds = {n: file.get_slice(n).get_dtype() for n in file.keys()}  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError) as error:
            raise ModelSourceError(
                f"{path.name} is damaged or cut short: {error}",
                where=str(path),
                expected="a complete safetensors file",
            ) from error
        found |= {name: by_name[kind] for name, kind in kinds.items() if kind in by_name}
    return found


def _require_plain(model: Any, head: Any, folder: Path) -> None:
    """Refuse by name what is known to stand between hidden states and logits, or between sequences."""
    config = model.config
    odd = [f"{n} = {v}" for n in _SCALES if (v := getattr(config, n, None)) not in (None, 1)]
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if rope in _LENGTH_DEPENDENT:
        odd.append(f"rotary positions of type {rope}")
    if not isinstance(head, nn.Linear) or head.bias is not None:
        odd.append("a head that is more than one matrix")
    if odd:
        raise TrainerError(
            f"{config.architectures[0]} with {', '.join(odd)} cannot be trained here",
            where=str(folder),
            expected="logits that are hidden states times one matrix",
        )


def _probe(vocab: int) -> tuple[Batch, list[list[int]]]:
    """A prompt with two continuations, and a sequence of its own; with each sequence's packed rows."""
    lengths, parents, depth = (5, 4, 6, 7), (-1, 0, 0, -1), (0, 5, 5, 0)
    count = sum(lengths)
    batch = Batch(
        tokens_T=[(7919 * i + 13) % vocab for i in range(count)],  # type: ignore[arg-type]  # it packs sequences
        positions_T=[d + i for d, n in zip(depth, lengths, strict=True) for i in range(n)],  # type: ignore[arg-type]
        segment_ids_T=[s for s, n in enumerate(lengths) for _ in range(n)],  # type: ignore[arg-type]
        segment_parents_S=parents,  # type: ignore[arg-type]
        predictors_N=(), targets_N=(), weights_N=(), sampler_logprobs_N=(), sequence_ids_N=(),  # type: ignore[arg-type]
    )  # fmt: skip
    return batch, [list(range(9)), [*range(5), *range(9, 15)], list(range(15, 22))]


def _compare(packed_TV: Tensor, alone_TV: Tensor, dtype: torch.dtype, folder: Path) -> None:
    gap = (packed_TV - alone_TV).abs()
    if dtype == torch.float32:
        found, allowed = gap.max().item(), _LARGEST_GAP * max(1.0, alone_TV.abs().max().item())
    else:
        found, allowed = gap.mean().item(), _MEAN_GAP * alone_TV.abs().mean().item()
    if not found <= allowed:
        raise TrainerError(
            f"packed sequences do not get this model's own logits: they differ by {found:.2g}",
            where=str(folder),
            expected=f"at most {allowed:.2g}: causal attention over tokens, and logits from one matrix",
        )


def _checkpointed_layers(model: Any) -> list[nn.Module]:
    """The layers that are computed again while their ``training`` flag is set; none where none can."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    if not model.supports_gradient_checkpointing:
        return []
    enable = getattr(
        model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
    )  # new, old
    enable({"use_reentrant": False, "preserve_rng_state": False})
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _in_fp32(_: nn.Module, __: tuple[Tensor], output: Tensor) -> Tensor:
    """The residual stream, which begins here, is fp32 also over frozen bf16 weights."""
    return output.float()
