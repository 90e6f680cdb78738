"""The native engine: asyncio in front, one decode thread behind, another that stages weights.

Requests submitted in one iteration of the event loop reach the decode thread as
one batch in the order of submission, so the same requests give the same bits
whatever the threads' timing. Each token carries the version that chose it; a
commit happens between two steps and running requests go on with the keys and
values they have. At most two versions of the weights are in memory: the one that
serves and the one that is staged; asleep, none. Whatever fails, no await is left
hanging.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from palestra.errors import EngineError, WeightsError, boundary
from palestra.models.config import ModelConfig
from palestra.models.dtypes import TORCH_DTYPES, DtypeName
from palestra.models.tokenizer import Tokenizer
from palestra.rollouts.base import (
    EngineStats,
    GenerateRequest,
    OnToken,
    PauseMode,
    RequestRefused,
)
from palestra.rollouts.native.adapters import Adapter
from palestra.rollouts.native.batch import DecodeBatch
from palestra.rollouts.native.budget import cache_positions, give_back_freed_memory
from palestra.rollouts.native.layers import Model
from palestra.rollouts.native.linears import LinearOps
from palestra.rollouts.native.rows import Row
from palestra.rollouts.native.stop import StopChecker
from palestra.rollouts.native.threads import available_cores, limit_this_thread
from palestra.rollouts.native.weights import Weights, load
from palestra.rollouts.native.worker import (
    Abort,
    DecodeWorker,
    DropAdapter,
    Install,
    Listener,
    LoadAdapter,
    Pause,
    Resume,
    Score,
    Submit,
)
from palestra.rollouts.requests import check_tokens, no_adapter, not_ready, too_long, version_lacking
from palestra.types import Boundary, Completion, Manifest, SamplingParams, Version

_COLDEST = 1e-5
"""Logits divided by less leave the range of fp32."""
_MAX_QUIET_WAITS = 16
"""Event-loop iterations for which a growing batch is held back at most."""


@dataclass(frozen=True, slots=True)
class _Staged:
    version: Version
    weights: Weights


class NativeEngine:
    """Implements `palestra.rollouts.base.Engine`, `Pausable`, `Sleeper` and `AdapterHost`."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: DtypeName,
        threads: int = 0,
        max_running: int = 64,
        context_tokens: int = 0,
        cache_mb: int = 0,
        eos_token_ids: Sequence[int] | None = None,
        device: str = "cpu",
    ) -> None:
        """Reads config and tokenizer of ``folder``; weights come through ``start``.

        ``threads`` 0 is all cores, ``context_tokens`` 0 the model's maximum, ``cache_mb`` 0 what
        ``max_running`` full contexts take, at most an eighth of the free memory; a quarter of the
        cache may hold what sessions have computed. ``eos_token_ids`` None means the model's own
        (an empty tuple ends nothing early).
        """
        self._config = ModelConfig.from_folder(folder)
        self._tokenizer = Tokenizer.from_folder(folder)
        self._context = _checked_context(context_tokens, self._config, folder)
        if max_running < 1:
            raise EngineError(f"max_running must be at least 1, got {max_running}")
        if threads < 0:
            raise EngineError(f"threads must be 0 (all cores) or more, got {threads}")
        self._max_running = max_running
        self._eos = frozenset(self._tokenizer.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self._threads = threads or available_cores()
        self._device = torch.device(device)
        self._ops = LinearOps.best(TORCH_DTYPES[dtype], self._threads, self._device)
        self._budget = cache_positions(
            self._config, self._ops.dtype, self._device, cache_mb, max_running, self._context
        )
        self._batch: DecodeBatch | None = None
        self._worker: DecodeWorker | None = None
        self._version: Version | None = None
        self._staged: _Staged | None = None
        self._stager: ThreadPoolExecutor | None = None
        self._adapter_keys: dict[str, str] = {}
        self._adapter_loads = 0
        self._update = asyncio.Lock()
        self._closed = False
        self._paused = False
        self._live = 0
        self._arrived = 0
        self._inbox: list[tuple[Row, Future[Completion], Listener | None]] = []
        self._flush_planned = False

    async def start(self, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Load the first version and begin to serve it; returns the digest as ``stage`` does."""
        async with self._update:
            self._check_open()
            if self._worker is not None:
                raise EngineError(
                    "the engine has been started already", expected="stage and commit from here on"
                )
            try:
                digest = await self._load(manifest, tensors)
                model = Model.build(self._config, self._ops, self._context)
                self._batch = DecodeBatch(
                    model,
                    max_running=self._max_running,
                    context=self._context,
                    budget=self._budget,
                    prefix_budget=self._budget // 4,
                )
                self._worker = DecodeWorker(self._batch, threads=self._threads)
                self._worker.start()
                await self._install(manifest.version, self._worker)
            except BaseException:
                await self._drop()
                raise
            return digest

    async def generate(self, request: GenerateRequest, on_token: OnToken | None = None) -> Completion:
        """Sample one completion; see the port."""
        worker = self._running_worker()
        row = self._row(request)
        future: Future[Completion] = Future()
        loop = asyncio.get_running_loop()
        self._inbox.append((row, future, Listener(on_token, loop) if on_token else None))
        self._arrived += 1
        if not self._flush_planned:
            self._flush_planned = True
            loop.call_soon(self._flush_when_quiet, self._arrived, _MAX_QUIET_WAITS)
        self._live += 1
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._forget(row, worker)
            raise
        finally:
            self._live -= 1

    async def score(self, token_ids: Sequence[int], sampling: SamplingParams) -> tuple[float, ...]:
        """Logprobs of ``token_ids[1:]`` under the serving version.

        A token that top-k or top-p leaves out has the logprob -inf.
        """
        worker = self._running_worker()
        tokens = tuple(token_ids)
        self._check_tokens(tokens, "the sequence to score")
        self._check_sampling(sampling)
        if len(tokens) > self._context:
            raise self._too_long(len(tokens), "the sequence to score", self._context)
        self._flush()
        answer: Future[tuple[float, ...]] = Future()
        worker.post(Score(tokens, sampling, answer))
        return await asyncio.wrap_future(answer)

    async def stage(self, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Take the next version's tensors while serving the current one; iterated in another thread."""
        async with self._update:
            self._running_worker()
            return await self._load(manifest, tensors)

    async def commit(self, version: Version) -> None:
        """Swap to the staged version between two decode steps; running requests continue on it."""
        async with self._update:
            await self._install(version, self._running_worker())

    @property
    def version(self) -> Version | None:
        """The version that serves; None before ``start`` and asleep."""
        return self._version

    def stats(self) -> EngineStats:
        """Totals since start, and the present load."""
        if self._batch is None or self._worker is None:
            return EngineStats(0, 0, 0, 0, 0.0)
        running = len(self._batch.running)
        return EngineStats(
            prompt_tokens=self._batch.prompt_tokens,
            generated_tokens=self._batch.generated_tokens,
            running=running,
            waiting=max(0, self._live - running),
            busy_s=self._worker.busy_s,
            reused_tokens=self._batch.reused_tokens,
        )

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Return when no token is being computed; see the port."""
        if mode not in get_args(PauseMode):
            raise EngineError(f"there is no pause mode {mode!r}", expected=", ".join(get_args(PauseMode)))
        worker = self._running_worker()
        self._flush()
        answer: Future[None] = Future()
        worker.post(Pause(mode, answer))
        try:
            await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            if not self._paused:
                worker.post(Resume())  # nobody knows of this pause, so nobody would end it
            raise
        self._paused = True

    async def resume(self) -> None:
        """Go on where ``pause`` stopped."""
        self._running_worker().post(Resume())
        self._paused = False

    async def sleep(self) -> None:
        """End every request and free weights, caches and adapters; ``start`` wakes the engine."""
        async with self._update:
            self._check_open()
            if self._worker is None:
                return
            self._flush()
            answer: Future[None] = Future()
            self._worker.post(Abort(answer))
            await asyncio.wrap_future(answer)
            await self._drop()
            give_back_freed_memory()

    async def load_adapter(
        self, name: str, config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]
    ) -> None:
        """Serve a LoRA adapter under ``name``; see the port. Rows that run keep the one they began with."""
        async with self._update:
            worker = self._running_worker()
            if not name:
                raise EngineError("an adapter needs a name", expected="the name that requests will use")
            adapter = await asyncio.get_running_loop().run_in_executor(
                self._stager, self._prepared, name, config, tensors
            )
            self._check_open()
            self._flush()  # what was asked before keeps the old one
            self._adapter_loads += 1
            key = f"{name}#{self._adapter_loads}"
            worker.post(LoadAdapter(key, adapter, replaces=self._adapter_keys.get(name, "")))
            self._adapter_keys[name] = key

    async def drop_adapter(self, name: str) -> None:
        """Forget an adapter; requests that run with it finish with it."""
        key = self._key_of(name)
        self._flush()
        self._running_worker().post(DropAdapter(key))
        del self._adapter_keys[name]

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names that requests may use, sorted."""
        return tuple(sorted(self._adapter_keys))

    async def close(self) -> None:
        """End every request (they raise EngineError) and free the memory. May be called twice."""
        self._closed = True
        self._flush()
        await self._drop()

    # -- requests

    def _row(self, request: GenerateRequest) -> Row:
        label = f"the prompt of request {request.id}" if request.id else "the prompt"
        self._check_tokens(request.prompt_ids, label)
        if request.logit_bias:
            self._check_tokens(tuple(request.logit_bias), "logit_bias")
        self._check_sampling(request.sampling)
        self._check_version(request)
        room = self._context - len(request.prompt_ids)
        if room < 1:
            raise self._too_long(len(request.prompt_ids), label, self._context - 1)
        stop = StopChecker(
            request.sampling,
            room=room,
            eos_token_ids=self._eos,
            token_bytes=self._tokenizer.token_bytes,
            at_least=request.min_new_tokens,
        )
        row = Row(
            request,
            stop,
            room,
            adapter=self._key_of(request.adapter) if request.adapter else "",
            never_first=self._eos | frozenset(request.sampling.stop_token_ids),
        )
        if row.need > self._budget:
            raise RequestRefused(
                f"{label} and its completion may take {row.need} positions; the cache holds {self._budget}",
                expected=f"at most {self._budget} tokens, prompt and max_new_tokens together",
                next_command="lower max_new_tokens, or raise engine.cache_mb",
            )
        return row

    def _check_sampling(self, sampling: SamplingParams) -> None:
        if 0 < sampling.temperature < _COLDEST:
            raise RequestRefused(
                f"logits cannot be divided by the temperature {sampling.temperature}",
                expected=f"temperature 0 (the likeliest token), or at least {_COLDEST}",
            )

    def _check_version(self, request: GenerateRequest) -> None:
        lacking = version_lacking(self._version, request)
        if self._version is not None and lacking:
            raise not_ready(self._version, lacking)

    def _key_of(self, adapter: str) -> str:
        key = self._adapter_keys.get(adapter)
        if key is None:
            raise no_adapter(adapter, self._adapter_keys)
        return key

    def _check_tokens(self, tokens: Sequence[int], label: str) -> None:
        check_tokens(tokens, label, self._config.vocab_size)

    def _too_long(self, length: int, label: str, limit: int) -> RequestRefused:
        most = self._config.max_positions
        return too_long(length, label, context=self._context, limit=limit, model_limit=most)

    def _flush_when_quiet(self, seen: int, waits_left: int) -> None:
        """Hand the inbox over once an iteration of the event loop has added nothing to it."""
        if self._arrived > seen and waits_left > 0:
            loop = asyncio.get_running_loop()
            loop.call_soon(self._flush_when_quiet, self._arrived, waits_left - 1)
            return
        self._flush_planned = False
        self._flush()

    def _flush(self) -> None:
        inbox, self._inbox = self._inbox, []
        if not inbox:
            return
        rows = tuple((row, future) for row, future, _ in inbox)
        listeners = tuple((row, listener) for row, _, listener in inbox if listener is not None)
        try:
            self._running_worker().post(Submit(rows, listeners))
        except EngineError as error:
            for _, future in rows:
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)

    def _forget(self, row: Row, worker: DecodeWorker) -> None:
        kept = [entry for entry in self._inbox if entry[0] is not row]
        if len(kept) < len(self._inbox):
            self._inbox = kept
        else:
            worker.cancel(row)

    # -- weights

    async def _load(self, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Build a version in the staging thread; only a complete and proven one becomes staged."""
        self._staged = None
        if self._stager is None:
            self._stager = ThreadPoolExecutor(
                1, "palestra-stage", initializer=limit_this_thread, initargs=(1,)
            )
        loop = asyncio.get_running_loop()
        self._staged, digest = await loop.run_in_executor(
            self._stager, _load_version, self._config, self._ops, manifest, tensors
        )
        if self._closed:  # while this waited: the close has forgotten everything, and nothing may come after
            self._staged = None
            self._check_open()
        return digest

    async def _install(self, version: Version, worker: DecodeWorker) -> None:
        """Let what is staged serve. Cancelling waits for the swap: only then is it known what serves."""
        if self._staged is None or self._staged.version != version:
            held = f"{self._staged.version} is staged" if self._staged else "nothing is staged"
            raise WeightsError(
                f"{version} cannot be committed: {held}", expected="stage(manifest, tensors) of it first"
            )
        self._flush()
        answer: Future[None] = Future()
        worker.post(Install(self._staged.weights, version, answer))
        waiter = asyncio.wrap_future(answer)
        cancelled: asyncio.CancelledError | None = None
        while not waiter.done():
            try:
                await asyncio.shield(waiter)
            except asyncio.CancelledError as error:
                cancelled = error
        waiter.result()
        self._check_open()
        self._staged, self._version = None, version
        if cancelled is not None:
            raise cancelled

    def _prepared(
        self, name: str, config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]
    ) -> Adapter:
        with boundary(Boundary.WEIGHTS, f"taking adapter {name}"), torch.inference_mode():
            return Adapter.build(self._config, self._ops, config, tensors)

    async def _drop(self) -> None:
        """End both threads and forget everything they held."""
        worker, stager = self._worker, self._stager
        loop = asyncio.get_running_loop()
        if worker is not None:
            await loop.run_in_executor(None, worker.join)
        if stager is not None:
            await loop.run_in_executor(None, stager.shutdown)
        self._batch = self._worker = self._stager = None
        self._version = self._staged = None
        self._adapter_keys.clear()
        self._paused = False

    # -- state

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed", expected="a new engine")

    def _running_worker(self) -> DecodeWorker:
        self._check_open()
        if self._worker is None or self._version is None:
            raise EngineError(
                "the engine has not been started", next_command="await engine.start(manifest, tensors)"
            )
        self._worker.check()
        return self._worker


def _load_version(
    config: ModelConfig, ops: LinearOps, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]]
) -> tuple[_Staged, str]:
    with boundary(Boundary.WEIGHTS, f"taking the tensors of {manifest.version}"), torch.inference_mode():
        weights, digest = load(config, ops, manifest, tensors)
    return _Staged(manifest.version, weights), digest


def _checked_context(context_tokens: int, config: ModelConfig, folder: Path) -> int:
    if context_tokens > config.max_positions or context_tokens < 0:
        raise EngineError(
            f"context_tokens is {context_tokens}",
            where=str(folder),
            expected=f"0 to {config.max_positions}, the model's maximum (0 means the maximum)",
        )
    return context_tokens or config.max_positions
