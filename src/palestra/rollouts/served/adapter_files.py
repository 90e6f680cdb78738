"""LoRA adapters of an engine in another process: handed over as files, under names of their own.

Each load gets a fresh name in the server, and requests are sent to it only once it is
there; the one it replaces is taken away when no request runs with it. So a request
sees the old or the new one and never neither (case 5), and no cached prompt of the
old one is used for the new.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.errors import EngineError, WeightsError
from palestra.rollouts.requests import no_adapter
from palestra.rollouts.served.http import Refused

if TYPE_CHECKING:
    from torch import Tensor


class ServedAdapters:
    """Which adapters there are, and which name the server knows each by."""

    def __init__(
        self,
        most_rank: int,
        add: Callable[[str, Path], Awaitable[None]],
        remove: Callable[[str], Awaitable[None]],
    ) -> None:
        self._most_rank = most_rank
        self._add, self._remove = add, remove
        self._keys: dict[str, str] = {}
        self._folders: dict[str, Path] = {}
        self._users: dict[str, int] = {}
        self._loads = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._keys))

    def clear(self) -> None:
        """Forget everything: the server is gone."""
        self._keys.clear()
        self._folders.clear()
        self._users.clear()

    def check(self, name: str) -> None:
        """Raise EngineError if ``name`` is no adapter; the empty name is the model itself."""
        if name and name not in self._keys:
            raise no_adapter(name, self._keys)

    @contextmanager
    def using(self, name: str) -> Iterator[str]:
        """The server's name for ``name``, which stays while the request runs."""
        self.check(name)
        if not name:
            yield ""
            return
        key = self._keys[name]
        self._users[key] += 1
        try:
            yield key
        finally:
            if key in self._users:
                self._users[key] -= 1

    async def load(
        self, name: str, config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]], home: Path | None
    ) -> None:
        """Hand the adapter over; WeightsError where the server does not take it, and nothing changed."""
        if not name or home is None:
            raise EngineError("an adapter needs a name", expected="the name that requests will use")
        self._check_rank(config)
        self._loads += 1
        key = f"{name}#{self._loads}"
        folder = home / f"adapter-{self._loads}"
        _write(folder, config, tensors)
        try:
            await self._add(key, folder)
        except Refused as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise WeightsError(f"the adapter {name!r} was not taken: {error.what}") from error
        self._folders[key], self._users[key] = folder, 0
        self._keys[name] = key
        await self._sweep()

    async def drop(self, name: str) -> None:
        """Forget the adapter; EngineError if there is none of this name."""
        if not name:
            raise EngineError("an adapter needs a name")
        self.check(name)
        del self._keys[name]
        await self._sweep()

    async def _sweep(self) -> None:
        """Take away what no name stands for and no request runs with."""
        named = set(self._keys.values())
        for key in [k for k, users in self._users.items() if k not in named and not users]:
            del self._users[key]
            await self._remove(key)
            shutil.rmtree(self._folders.pop(key), ignore_errors=True)

    def _check_rank(self, config: Mapping[str, Any]) -> None:
        rank = config.get("r")
        if not self._most_rank:
            raise EngineError(
                "this engine was started without adapters", next_command="build it with adapter_rank=16"
            )
        if not isinstance(rank, int) or not 0 < rank <= self._most_rank:
            raise WeightsError(
                f"the adapter's rank is {rank}",
                expected=f"1 to {self._most_rank} (adapter_rank)",
                next_command="build the engine with a higher adapter_rank",
            )


def _write(folder: Path, config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(dict(config)))
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
    save_file(held, folder / "adapter_model.safetensors")
