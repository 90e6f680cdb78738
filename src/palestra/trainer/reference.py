"""The policy that a KL term holds on to, computed by the one network there is.

It is the starting model or a running mean of the masters. While it is active its
values stand in the masters' place, so scoring needs no second network: over LoRA
the starting model is the network with its adapters off and costs nothing; else
it costs one more copy of the weights, allocated when first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from palestra.trainer.network import Network


class Reference:
    """``start`` gives the starting masters; a ``decay`` above 0 asks for the running mean instead."""

    def __init__(self, network: Network, decay: float, start: Callable[[], Mapping[str, Tensor]]) -> None:
        self._network = network
        self._decay = decay
        self._start = start
        self._values: dict[str, Tensor] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """The network computes as the reference within, and as before after."""
        if self._network.low_rank is not None and not self._decay:
            with self._network.low_rank.off():
                yield
            return
        if not self._values:
            self._values = self.mean() or {n: t.detach() for n, t in self._start().items()}
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def mean(self) -> dict[str, Tensor]:
        """The running mean by name, for the optimiser's state; {} where the reference is the start."""
        if self._decay and not self._values:
            self._values = {n: t.detach().clone() for n, t in self._network.masters.items()}
        return self._values if self._decay else {}

    @torch.no_grad()
    def follow(self) -> None:
        """Move the running mean towards the masters, after an update."""
        for name, value in self.mean().items():
            value.lerp_(self._network.masters[name], 1 - self._decay)

    def _exchange(self) -> None:
        for name, master in self._network.masters.items():
            value = self._values[name]
            master.data, value.data = value.data, master.data
