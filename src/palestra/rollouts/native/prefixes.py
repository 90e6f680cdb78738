"""What sessions have computed and may compute upon: keys and values by session, for one policy version.

Everything here was computed under the weights that serve now; the batch empties it
with every new version, so a prefix never survives its policy (NeMo-RL PR#4018,
vllm#9744). A session meets only what it left itself: other sessions can push its
entry out, which costs time, but never give it other numbers. The oldest goes first.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

Key = tuple[str, str]
"""Session and adapter."""


@dataclass(frozen=True, slots=True)
class Prefix:
    tokens: tuple[int, ...]
    cache_2LKTD: Tensor
    """As `Pool.copied` returns it."""


class PrefixStore:
    """At most ``budget`` positions, the most recently used sessions'."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.held = 0
        """Positions held now."""
        self._entries: dict[Key, Prefix] = {}

    def keep(self, key: Key, prefix: Prefix) -> None:
        """Remember the session's last sequence in place of an earlier one; too long a one is let go."""
        self.forget(key)
        if len(prefix.tokens) > self.budget:
            return
        self.shrink(self.budget - len(prefix.tokens))
        self._entries[key] = prefix
        self.held += len(prefix.tokens)

    def find(self, key: Key, prompt: tuple[int, ...]) -> tuple[Prefix, int] | None:
        """The session's entry and how many tokens of ``prompt`` it covers, at least one and never all."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self._entries[key] = entry  # now the youngest
        most = min(len(entry.tokens), len(prompt) - 1)
        same = next((i for i in range(most) if entry.tokens[i] != prompt[i]), most)
        return (entry, same) if same else None

    def forget(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.held -= len(entry.tokens)

    def shrink(self, held: int) -> None:
        """Let the oldest go until at most ``held`` positions are left."""
        while self.held > max(0, held):
            self.forget(next(iter(self._entries)))

    def clear(self) -> None:
        self._entries.clear()
        self.held = 0

    def __len__(self) -> int:
        return len(self._entries)
