"""An engine behind HTTP, as the engine port: what vLLM and SGLang have in common.

The server is a child of this process (`ChildServer`). A request is sent only while no
version is being committed, so each token's version follows from what the server says
when the request ends; its prompt is cached under the version that serves. Why a
completion ends is decided here, token by token, by the same `StopChecker` as in the
native engine. When the server dies, everything that waits raises EngineDead with the
last lines it printed; a commit that fails ends the server, for its weights are unknown.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from palestra.errors import EngineError, WeightsError
from palestra.models.config import read_json
from palestra.models.tokenizer import Tokenizer
from palestra.rollouts.base import (
    EngineStats,
    GenerateRequest,
    OnToken,
    PauseMode,
    RequestRefused,
)
from palestra.rollouts.native.stop import StopChecker
from palestra.rollouts.requests import check_tokens, not_ready, too_long, version_lacking
from palestra.rollouts.served import leftovers
from palestra.rollouts.served.adapter_files import ServedAdapters
from palestra.rollouts.served.child import ChildServer
from palestra.rollouts.served.handover import link_model, room_for, shapes_of, write_version
from palestra.rollouts.served.http import MOST_CONNECTIONS, Broken, HttpClient, Refused
from palestra.rollouts.served.life import ServerLife
from palestra.rollouts.served.pieces import End, Piece, Sample
from palestra.types import Completion, Manifest, SamplingParams, StopReason, Version

if TYPE_CHECKING:
    from torch import Tensor

_T = TypeVar("_T")

CONTROL_S = 60.0
"""How long pausing, resuming and the like may take."""
LOAD_S = 1800.0
"""How long loading a version may take."""


class ServedEngine(ABC):
    """Implements `Engine`, `Pausable`, `Sleeper`, `AdapterHost`; subclasses know one kind of server."""

    kind = "engine"

    def __init__(
        self,
        folder: Path,
        *,
        max_running: int = 64,
        context_tokens: int = 0,
        startup_s: float = 600.0,
        silent_s: float = 60.0,
        eos_token_ids: Sequence[int] | None = None,
        adapter_rank: int = 0,
    ) -> None:
        """``folder`` is the model in Hugging Face layout; its weights say only which tensors there are.

        ``startup_s``: until the server must answer; ``silent_s``: how long it may not answer later.
        ``adapter_rank`` is the highest rank of a LoRA adapter; 0 serves none.
        """
        raw = read_json(folder / "config.json")
        raw = raw.get("text_config", raw)
        self._vocabulary = int(raw["vocab_size"])
        self._most_positions = int(raw.get("max_position_embeddings", 2048))
        if not 0 <= context_tokens <= self._most_positions:
            raise EngineError(
                f"context_tokens is {context_tokens}",
                expected=f"0 to {self._most_positions}, the model's maximum",
                where=str(folder),
            )
        if max_running < 1:
            raise EngineError(f"max_running must be at least 1, got {max_running}")
        self._folder = folder
        self._context = context_tokens or self._most_positions
        self._max_running = max_running
        self._startup_s, self._silent_s = startup_s, silent_s
        self._tokenizer = Tokenizer.from_folder(folder)
        self._eos = frozenset(self._tokenizer.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self._adapter_rank = adapter_rank
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._home: Path | None = None
        self._life: ServerLife | None = None
        self._adapters = ServedAdapters(adapter_rank, self._add_adapter, self._remove_adapter)
        self._version: Version | None = None
        self._staged: tuple[Manifest, Path] | None = None
        self._update = asyncio.Lock()
        self._open = asyncio.Event()
        self._slots = asyncio.Semaphore(max(MOST_CONNECTIONS, max_running))
        self._paused = False
        self._drain: asyncio.Future[None] | None = None
        self._swaps = 0
        self._sleeps = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self._live = self._sent = 0
        self._prompt_tokens = self._generated_tokens = self._reused_tokens = 0
        self._busy_s, self._busy_since = 0.0, 0.0

    # -- what a kind of server must be able to do

    @abstractmethod
    async def _launch(self, home: Path, model: Path, version: Version) -> tuple[ChildServer, HttpClient]:
        """Start a server of ``model`` in the folder ``home``; it need not answer yet."""

    @abstractmethod
    async def _beats(self, timeout_s: float) -> None:
        """Return if the server answers; raise Broken or Refused if not."""

    @abstractmethod
    async def _adopt(self, version: Version) -> None:
        """Tell a server that has just started which version it serves."""

    @abstractmethod
    def _sampled(self, sample: Sample) -> AsyncGenerator[Piece, None]:
        """The completion, piece by piece. Closing the generator ends the request."""

    @abstractmethod
    async def _abort(self, sample: Sample) -> None:
        """End one request; its last piece still comes."""

    @abstractmethod
    async def _hold(self, mode: PauseMode) -> None: ...

    async def _end_all(self) -> None:
        """End every request that the server has; what it serves afterwards does not matter."""
        await self._hold("abort")

    @abstractmethod
    async def _go(self) -> None: ...

    @abstractmethod
    async def _load(self, file: Path, version: Version) -> None:
        """Replace the weights by those of ``file`` while nothing is computed."""

    @abstractmethod
    async def _scored(self, tokens: tuple[int, ...], sampling: SamplingParams) -> tuple[float, ...]: ...

    @abstractmethod
    async def _add_adapter(self, name: str, folder: Path) -> None: ...

    @abstractmethod
    async def _remove_adapter(self, name: str) -> None: ...

    @abstractmethod
    def _refuse(self, request: GenerateRequest) -> None:
        """Raise EngineError for what this server cannot sample exactly as asked."""

    @property
    def _http(self) -> HttpClient:
        if self._life is None:
            raise Broken("there is no server")
        return self._life.client

    # -- the engine port

    async def start(self, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Write the first version, start the server on it, and wait until it answers."""
        async with self._update:
            self._check_open()
            if self._life is not None and self._life.dead is not None:
                await self._drop()
            if self._life is not None:
                raise EngineError(
                    "the engine has been started already", expected="stage and commit from here on"
                )
            self._open.clear()
            file = None
            try:
                await asyncio.to_thread(leftovers.sweep)
                self._check_open()
                self._home = leftovers.make_folder(f"{self.kind}-")
                file, digest = await self._written(manifest, tensors)
                self._check_open()
                link_model(self._folder, self._home / "model", file)
                server, client = await self._launch(self._home, self._home / "model", manifest.version)
                self._life = ServerLife(self.kind, server, client, self._beats, self._mourn, self._silent_s)
                self._check_open()
                await self._life.come_up(self._startup_s)
                await self._adopt(manifest.version)
            except BaseException:
                await self._drop()
                raise
            finally:
                self._discard(file)
            self._version = manifest.version
            self._open.set()
            return digest

    async def generate(self, request: GenerateRequest, on_token: OnToken | None = None) -> Completion:
        """Sample one completion; see the port. Cancelling the await ends the request in the server."""
        self._check_serving(request)
        self._check_request(request)
        sleeps = self._sleeps
        self._live += 1
        try:
            async with self._slots:
                while not self._open.is_set() and self._sleeps == sleeps:
                    await self._open.wait()
                if self._sleeps != sleeps:
                    return Completion((), (), (), StopReason.ABORTED)
                self._check_serving(request)
                with self._counted():
                    return await self._surviving(lambda: self._completed(request, on_token))
        except Refused:
            if self._sleeps == sleeps:
                raise
            return Completion((), (), (), StopReason.ABORTED)  # it came when the server was ending all
        finally:
            self._live -= 1

    async def score(self, token_ids: Sequence[int], sampling: SamplingParams) -> tuple[float, ...]:
        """Logprobs of ``token_ids[1:]``, shaped by temperature, top-k and top-p as in ``generate``."""
        self._check_serving(None)
        tokens = tuple(token_ids)
        self._check_tokens(tokens, "the sequence to score", self._context)
        if self._paused:
            raise EngineError(
                f"{self.kind} computes nothing while it is paused", next_command="await engine.resume()"
            )
        if len(tokens) == 1:
            return ()
        return await self._surviving(lambda: self._scored(tokens, sampling))

    async def stage(self, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Write the next version where the server can read it, while it serves the current one."""
        async with self._update:
            self._check_serving(None)
            file, digest = await self._written(manifest, tensors)
            if self._life is None:  # closed meanwhile
                self._discard(file)
            self._check_serving(None)
            if self._staged is not None:
                self._discard(self._staged[1])
            self._staged = (manifest, file)
            return digest

    async def commit(self, version: Version) -> None:
        """Hold every request, load the staged version, go on. Requests keep their keys and values."""
        async with self._update:
            self._check_serving(None)
            if self._staged is None or self._staged[0].version != version:
                staged = f"{self._staged[0].version} is staged" if self._staged else "nothing is staged"
                raise WeightsError(f"{version} cannot be committed: {staged}", expected="stage it first")
            file, self._staged = self._staged[1], None
            self._open.clear()
            try:
                if not self._paused:
                    await self._hold("keep")
                await self._load(file, version)
                self._swaps += 1
                self._version = version
                if not self._paused:
                    await self._go()
            except BaseException as error:
                assert self._life is not None
                failed = await self._life.condemn(f"committing {version} failed", error)
                if not isinstance(error, Exception):
                    raise  # a cancellation stays one; the engine is gone all the same
                raise failed from error
            finally:
                self._discard(file)
            if not self._paused:
                self._open.set()

    @property
    def version(self) -> Version | None:
        """The version that serves; None before ``start``, asleep, and once the server is dead."""
        return self._version

    def stats(self) -> EngineStats:
        """Totals since this object was made; ``running`` is what may run of what was sent."""
        running = min(self._sent, self._max_running)
        since = time.monotonic() - self._busy_since if self._sent else 0.0
        return EngineStats(
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            running=running,
            waiting=self._live - running,
            busy_s=self._busy_s + since,
            reused_tokens=self._reused_tokens,
        )

    async def close(self) -> None:
        """End every request (they raise EngineError) and the server. May be called twice."""
        self._closed = True
        await self._drop()
        self._open.set()

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Return when no token is being computed; see the port. Scoring is refused until ``resume``.

        ``resume`` and ``sleep`` end a drain early: then this returns and nothing is paused.
        """
        if mode not in get_args(PauseMode):
            raise RequestRefused(f"there is no way to pause {mode!r}", expected="keep, drain or abort")
        async with self._update:
            self._check_serving(None)
            self._open.clear()
            hold = asyncio.ensure_future(self._surviving(lambda: self._hold(mode)))
            self._drain = hold if mode == "drain" else None
            try:
                await hold
                self._paused = True
            except BaseException:
                if not self._paused:
                    with suppress(EngineError):
                        await self._go()
                    self._open.set()
                task = asyncio.current_task()
                if not hold.cancelled() or (task is not None and task.cancelling()):
                    raise
            finally:
                self._drain = None

    def _end_drain(self) -> None:
        """What waits for requests to finish holds ``_update``: whoever needs it now ends the waiting."""
        if self._drain is not None:
            self._drain.cancel()

    async def resume(self) -> None:
        """Go on where ``pause`` stopped, or still waits for requests to finish."""
        self._end_drain()
        async with self._update:
            self._check_serving(None)
            if self._paused:
                await self._surviving(self._go)
                self._paused = False
                self._open.set()

    async def sleep(self) -> None:
        """End every request (ABORTED) and the server, which frees all it held; ``start`` wakes it.

        EngineError if requests did not end in time: then they were cut off, and it sleeps all the same.
        """
        self._end_drain()
        async with self._update:
            self._check_open()
            if self._life is None:
                return
            self._sleeps += 1
            self._open.set()  # who waits to be sent ends as aborted
            self._open = asyncio.Event()
            await self._surviving(self._end_all)
            with suppress(TimeoutError):
                async with asyncio.timeout(CONTROL_S):
                    await self._idle.wait()
            left = self._sent
            await self._drop()
            if left:
                raise EngineError(
                    f"{left} requests did not end within {CONTROL_S:g} s of sleep and were cut off"
                )

    async def load_adapter(
        self, name: str, config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]
    ) -> None:
        """Serve a LoRA adapter under ``name``; requests that run keep the one they began with."""
        async with self._update:
            self._check_serving(None)
            await self._surviving(lambda: self._adapters.load(name, config, tensors, self._home))

    async def drop_adapter(self, name: str) -> None:
        """Forget an adapter; requests that run with it finish with it."""
        async with self._update:
            self._check_serving(None)
            await self._surviving(lambda: self._adapters.drop(name))

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names that requests may use, sorted."""
        return self._adapters.names

    # -- requests

    async def _completed(self, request: GenerateRequest, on_token: OnToken | None) -> Completion:
        assert self._version is not None
        number, swaps = self._version.number, self._swaps
        room = self._context - len(request.prompt_ids)
        stop = StopChecker(
            request.sampling,
            room=room,
            eos_token_ids=self._eos,
            token_bytes=self._tokenizer.token_bytes,
            at_least=request.min_new_tokens,
        )
        ids: list[int] = []
        logprobs: list[float] = []
        told, reason, end = 0, None, None
        with self._adapters.using(request.adapter) as adapter:
            sample = Sample(
                id=uuid.uuid4().hex,
                request=request,
                most=min(request.sampling.max_new_tokens, room),
                stop_token_ids=tuple(sorted(self._eos | frozenset(request.sampling.stop_token_ids))),
                salt=salt_of(self._version),
                adapter=adapter,
            )
            async with aclosing(self._sampled(sample)) as pieces:
                async for piece in pieces:
                    end = piece.end
                    if end is None and self._swaps != swaps:
                        self._check_serving(request)  # an exact version that serves no more
                    if reason is not None:
                        continue  # sampled before the server heard that it was to stop
                    for token, logprob in zip(piece.token_ids, piece.logprobs, strict=True):
                        ids.append(token)
                        logprobs.append(min(logprob, 0.0))
                        if on_token and self._swaps == swaps:
                            on_token(token, logprobs[-1], number)
                            told += 1
                        reason = stop.check(token)
                        if reason is not None:
                            break
                    if reason is not None and end is None:
                        await self._abort(sample)
        if end is None:
            raise Broken(f"{self.kind} ended a completion without saying why")
        versions = _versions(end, len(ids), self.kind)
        if request.exact_version is not None and any(v != request.exact_version for v in versions):
            raise not_ready(self._version, f"version {request.exact_version}")
        for i in range(told, len(ids) if on_token else 0):
            on_token(ids[i], logprobs[i], versions[i])  # type: ignore[misc]  # the range is empty without it
        if reason is None and end.reason is None:
            raise EngineError(f"{self.kind} ended a completion after {len(ids)} of {sample.most} tokens")
        self._prompt_tokens += len(request.prompt_ids) - end.cached_tokens
        self._reused_tokens += end.cached_tokens
        self._generated_tokens += len(ids)
        return Completion(tuple(ids), tuple(logprobs), versions, reason or end.reason)  # type: ignore[arg-type]

    def _check_request(self, request: GenerateRequest) -> None:
        label = f"the prompt of request {request.id}" if request.id else "the prompt"
        self._check_tokens(request.prompt_ids, label, self._context - 1)
        if request.logit_bias:
            self._check_tokens(tuple(request.logit_bias), "logit_bias", self._vocabulary)
        self._adapters.check(request.adapter)
        self._refuse(request)

    def _check_tokens(self, tokens: Sequence[int], label: str, most: int) -> None:
        check_tokens(tokens, label, self._vocabulary)
        if len(tokens) > most:
            limit = self._most_positions
            raise too_long(len(tokens), label, context=self._context, limit=most, model_limit=limit)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed")

    def _check_serving(self, request: GenerateRequest | None) -> None:
        self._check_open()
        if self._life is not None and self._life.dead is not None:
            raise self._life.dead
        if self._version is None:
            raise EngineError("the engine has not been started", next_command="await engine.start(...)")
        if request is None:
            return
        lacking = version_lacking(self._version, request)
        if lacking:
            raise not_ready(self._version, lacking)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if not self._sent:
            self._busy_since = time.monotonic()
            self._idle.clear()
        self._sent += 1
        try:
            yield
        finally:
            self._sent -= 1
            if not self._sent:
                self._busy_s += time.monotonic() - self._busy_since
                self._idle.set()

    # -- the server's life

    async def _surviving(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """The result of ``work``; where it fails because the server died or was closed, that is raised."""
        life = self._life
        try:
            return await work()
        except (Broken, Refused) as error:
            self._check_open()
            cause = await life.cause(error) if life is not None else error
            self._check_open()
            if cause is error:
                raise
            raise cause from error

    def _mourn(self) -> None:
        """The server died: whoever waits to be sent learns it now."""
        self._version = None
        self._open.set()

    async def _written(self, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]]) -> tuple[Path, str]:
        """The version as a file in a folder of its own, and the digest of the bytes in it."""
        assert self._home is not None
        folder = room_for(manifest.nbytes)
        leftovers.note_room(self._home, folder)

        abandoned = False

        def write() -> tuple[Path, str]:
            whole = False
            try:
                self._shapes = self._shapes or shapes_of(self._folder)
                path = folder / "model.safetensors"
                digest = write_version(path, manifest, tensors, self._shapes)
                whole = True
                return path, digest
            finally:
                if abandoned or not whole:
                    shutil.rmtree(folder, ignore_errors=True)

        writing = asyncio.ensure_future(asyncio.to_thread(write))
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:  # the thread goes on, maybe longer than the event loop
            abandoned = True
            shutil.rmtree(folder, ignore_errors=True)
            writing.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise

    def _discard(self, file: Path | None) -> None:
        if file is not None:
            shutil.rmtree(file.parent, ignore_errors=True)

    async def _drop(self) -> None:
        """End the server and everything of it; of one that died the log stays."""
        self._version = None
        life, self._life = self._life, None
        died = life is not None and life.dead is not None
        if life is not None:
            await life.stop()
        if self._staged is not None:
            self._discard(self._staged[1])
            self._staged = None
        if self._home is not None and died:
            leftovers.leave(self._home)
        elif self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)
        self._home = None
        self._adapters.clear()
        self._paused = False


def _versions(end: End, count: int, kind: str) -> tuple[int, ...]:
    """The version number of each token, from the spans that the server gave."""
    numbers: list[int] = []
    for version, first, after in end.versions:
        if first != len(numbers) or after < first:
            raise EngineError(f"{kind} gave version spans with a gap: {end.versions}")
        numbers += [Version.parse(version).number] * (after - first)
    if len(numbers) < count:
        raise EngineError(f"{kind} gave versions for {len(numbers)} of {count} tokens: {end.versions}")
    return tuple(numbers[:count])


def salt_of(version: Version | None) -> str:
    """What a server caches prompts under while ``version`` serves."""
    return hashlib.sha256(str(version).encode()).hexdigest()[:32]
