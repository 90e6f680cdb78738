"""The native engine in a process of its own, behind the port: what one machine runs several of.

The process is ``palestra serve`` on a private socket, waiting for weights: nothing it
holds comes from anywhere but ``start`` and ``stage``, so what it serves is what was
published. A version is staged while the old one serves and committed under a short
hold. When the process dies, or says that the engine in it is dead, everything that
waits raises EngineDead with the last lines it printed, and a router sends the requests
elsewhere.
"""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncGenerator, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.errors import EngineError
from palestra.models.dtypes import DtypeName
from palestra.rollouts.base import GenerateRequest, PauseMode
from palestra.rollouts.served.child import ChildServer
from palestra.rollouts.served.engine import CONTROL_S, LOAD_S, ServedEngine
from palestra.rollouts.served.http import Gone, HttpClient
from palestra.rollouts.served.pieces import End, Piece, Sample
from palestra.types import Manifest, SamplingParams, StopReason, Version

if TYPE_CHECKING:
    from torch import Tensor


class ReplicaEngine(ServedEngine):
    """Implements `Engine`, `Pausable`, `Sleeper` and `AdapterHost` with a native engine elsewhere."""

    kind = "replica"

    def __init__(
        self,
        folder: Path,
        *,
        dtype: DtypeName,
        threads: int = 0,
        max_running: int = 64,
        context_tokens: int = 0,
        cache_mb: int = 0,
        startup_s: float = 120.0,
        silent_s: float = 10.0,
    ) -> None:
        """As `NativeEngine`; ``silent_s`` is how long the process may not answer before it counts as dead."""
        super().__init__(
            folder,
            max_running=max_running,
            context_tokens=context_tokens,
            startup_s=startup_s,
            silent_s=silent_s,
            adapter_rank=sys.maxsize,  # the engine takes any rank
        )
        self._dtype: DtypeName = dtype
        self._threads = threads
        self._cache_mb = cache_mb
        self._manifest: Manifest | None = None

    async def start(self, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """As the port says: a new process, which takes its first weights from here."""
        self._manifest = manifest
        return await super().start(manifest, tensors)

    async def stage(self, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """As the port says; the process has the version in its memory when this returns."""
        digest = await super().stage(manifest, tensors)
        async with self._update:
            self._check_serving(None)
            if self._staged is not None and self._staged[0] is manifest:
                file = self._staged[1]
                await self._surviving(lambda: self._sent_to_stage(manifest, file))
                self._discard(file)
        return digest

    async def _sent_to_stage(self, manifest: Manifest, file: Path) -> None:
        body = {"folder": str(file.parent), "manifest": manifest.to_json()}
        answer = await self._http.post("/v1/palestra/stage", body, timeout_s=LOAD_S)
        if answer["digest"] != manifest.digest:
            raise EngineError(f"the replica read other bytes than {manifest.version} holds")

    async def _launch(self, home: Path, model: Path, version: Version) -> tuple[ChildServer, HttpClient]:
        socket = home / "socket"
        command = [
            sys.executable, "-m", "palestra", "serve", str(model), "--uds", str(socket), "--wait-for-weights",
            "--name", "model", "--chat-template", "none", "--dtype", self._dtype,
            "--threads", str(self._threads), "--max-running", str(self._max_running),
            "--context-tokens", str(self._context), "--cache-mb", str(self._cache_mb),
        ]  # fmt: skip
        server = await ChildServer.launch(command, {}, home)
        return server, HttpClient(socket=socket)

    async def _beats(self, timeout_s: float) -> None:
        state = await self._http.get("/v1/palestra/state", timeout_s=timeout_s)
        if state["dead"]:
            raise Gone(200, "/v1/palestra/state", state["dead"])

    async def _adopt(self, version: Version) -> None:
        assert self._manifest is not None
        assert self._home is not None
        weights = (self._home / "model" / "model.safetensors").resolve()
        await self._sent_to_stage(self._manifest, weights)

    async def _sampled(self, sample: Sample) -> AsyncGenerator[Piece, None]:
        request = sample.request
        body: dict[str, Any] = {
            "prompt_ids": list(request.prompt_ids),
            "sampling": asdict(request.sampling),
            "id": request.id,
            "session": request.session,
            "adapter": sample.adapter,
            "min_new_tokens": request.min_new_tokens,
            "logit_bias": {str(token): bias for token, bias in request.logit_bias.items()},
            "stream": True,
        }
        assert self._version is not None
        run, count = self._version.run, 0
        spans: list[tuple[str, int, int]] = []
        async for event in self._http.events("/v1/palestra/generate", body):
            tokens = event["tokens"]
            if "stop_reason" in event:
                reason = StopReason(event["stop_reason"])
                known = reason if reason in (StopReason.STOP, StopReason.ABORTED) else None
                yield Piece((), (), End(known, tuple(spans)))
                return
            for _, _, number in tokens:
                spans.append((f"{run}@{number}", count, count + 1))
                count += 1
            yield Piece([token for token, _, _ in tokens], [logprob for _, logprob, _ in tokens])

    async def _abort(self, sample: Sample) -> None:
        """Nothing to do: the engine there stops by the same rules."""

    async def _hold(self, mode: PauseMode) -> None:
        limit = LOAD_S if mode == "drain" else CONTROL_S
        await self._http.post("/v1/palestra/pause", {"mode": mode}, timeout_s=limit)

    async def _end_all(self) -> None:
        await self._http.post("/v1/palestra/sleep", timeout_s=CONTROL_S)

    async def _go(self) -> None:
        await self._http.post("/v1/palestra/resume", timeout_s=CONTROL_S)

    async def _load(self, file: Path, version: Version) -> None:
        await self._http.post("/v1/palestra/commit", {"version": str(version)}, timeout_s=CONTROL_S)

    async def _scored(self, tokens: tuple[int, ...], sampling: SamplingParams) -> tuple[float, ...]:
        body = {"token_ids": list(tokens), "sampling": asdict(sampling)}
        answer = await self._http.post("/v1/palestra/score", body, timeout_s=LOAD_S)
        return tuple(-math.inf if value is None else value for value in answer["logprobs"])

    async def _add_adapter(self, name: str, folder: Path) -> None:
        body = {"name": name, "folder": str(folder)}
        await self._http.post("/v1/palestra/adapters/load", body, timeout_s=CONTROL_S)

    async def _remove_adapter(self, name: str) -> None:
        await self._http.post("/v1/palestra/adapters/drop", {"name": name}, timeout_s=CONTROL_S)

    def _refuse(self, request: GenerateRequest) -> None:
        """The engine there samples whatever this port can ask for."""
