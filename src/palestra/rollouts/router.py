"""Several engine replicas as one: it implements the engine port, so nothing above knows how many there are.

A request goes to a living replica that serves the version it asks for: the one
that holds its session or its prompt, else the one with the fewest outstanding
tokens. A replica that dies takes no request with it: what it held is sent again to
another, and a stream goes on where it stopped or ends with an error, never with
other tokens. A replica takes requests only once its weights were proven: those of a
sync by agreeing with every other replica on the first score after it, a new one by
digest and probe in ``join``. A dead replica stays out until it joins again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from palestra.errors import EngineError, PalestraError, WeightsError, traceback_of
from palestra.rollouts.base import (
    AdapterHost,
    Engine,
    EngineDead,
    EngineStats,
    GenerateRequest,
    OnToken,
    Pausable,
    PauseMode,
    Sleeper,
    VersionNotReady,
)
from palestra.rollouts.requests import version_lacking
from palestra.types import Completion, Manifest, SamplingParams, Version

if TYPE_CHECKING:
    from torch import Tensor

_T = TypeVar("_T")
_LOG = logging.getLogger(__name__)

SESSIONS = 100_000
"""Sessions whose replica is remembered, the most recent ones."""
SLACK_TOKENS = 4096
"""How many more outstanding tokens than the idlest a replica may have and still keep its sessions."""
RESENDS = 2
"""How often a request is sent again: one that kills every engine it meets must not kill them all."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What a replica must reproduce before it serves: the trainer's logprobs of ``token_ids[1:]``."""

    manifest: Manifest
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float
    """The largest allowed difference of one logprob."""


@dataclass(slots=True)
class Replica:
    """One engine behind the router, as the router sees it."""

    name: str
    engine: Engine
    outstanding: int = 0
    """Tokens of its requests, prompt and the most they may sample, that are not answered yet."""
    lost: str = ""
    """Why it takes no requests; empty while it lives."""
    proven: bool = False
    prompts: dict[tuple[int, ...], int] = field(default_factory=dict[tuple[int, ...], int])
    """How many of its requests have each prompt."""

    @property
    def alive(self) -> bool:
        return not self.lost


class Router:
    """Implements `Engine`, `Pausable`, `Sleeper` and `AdapterHost` over replicas of one model."""

    def __init__(
        self, replicas: Mapping[str, Engine], *, agreement: float = 1e-3, proof_s: float = 60.0
    ) -> None:
        """``agreement`` is the largest difference of a probe logprob between replicas (bf16: 1.0).

        ``proof_s`` is how long a request waits for the proof of a version just committed.
        """
        if not replicas:
            raise EngineError("a router needs at least one replica")
        self._replicas = {name: Replica(name, engine) for name, engine in replicas.items()}
        self.agreement = agreement
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._proof_s = proof_s
        self._proven = asyncio.Event()
        self._epoch = 0
        """How often everybody has become unproven: a proof counts for the epoch in which it began."""
        self._update = asyncio.Lock()
        self._staged: Manifest | None = None
        self._served: Manifest | None = None
        self.resent = 0
        """Requests that had to be sent again because their replica died."""

    @property
    def replicas(self) -> tuple[Replica, ...]:
        return tuple(self._replicas.values())

    # -- the engine port

    async def start(self, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Start every replica; those that fail are out, and if all fail the first failure is raised."""
        held = list(tensors)
        async with self._update:
            self._unprove()
            await self._each("start", lambda replica: self._started(replica, manifest, held))
            self._served = manifest
        return manifest.digest

    async def generate(self, request: GenerateRequest, on_token: OnToken | None = None) -> Completion:
        """Sample one completion on some replica; sent again if that one dies. See the port."""
        stream = _Stream(on_token) if on_token else None
        resends = 0
        while True:
            await self._wait_for_proof()
            replica = self._choose(request)
            try:
                with self._counted(replica, request):
                    completion = await replica.engine.generate(request, stream.again() if stream else None)
            except EngineDead as error:
                self._lose(replica, error)
                if resends == RESENDS:
                    raise
                resends += 1
                self.resent += 1
                continue
            if stream and stream.broken:
                raise EngineError(
                    "the replica died in a stream, and the one that went on samples other tokens",
                    expected="the same version on another replica",
                    next_command="the same request again",
                )
            return completion

    async def score(self, token_ids: Sequence[int], sampling: SamplingParams) -> tuple[float, ...]:
        """Logprobs from one replica; from all of them if some are not proven, which must agree.

        Raises WeightsError where they do not: then none of the unproven ones serves.
        """
        while all(replica.proven for replica in self._living()):
            replica = self._least()
            try:
                return await replica.engine.score(token_ids, sampling)
            except EngineDead as error:
                self._lose(replica, error)
        living, epoch = self._living(), self._epoch
        found = await self._each("score", lambda r: r.engine.score(token_ids, sampling))
        first = next(iter(found.values()))
        for name, logprobs in found.items():
            gap = _gap(first, logprobs)
            if gap > self.agreement:
                raise WeightsError(
                    f"replica {name} disagrees with {next(iter(found))} by {gap:.3g} on a probe logprob",
                    expected=f"at most {self.agreement:g}: they hold the same weights",
                    next_command="replace the replica that is wrong, or sync again",
                )
        if epoch == self._epoch:  # else these are the logprobs of a version that has gone
            for replica in living:
                replica.proven = replica.alive
            self._proven.set()
        return first

    async def stage(self, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Stage on every living replica; the tensors are produced once. A replica that fails is out."""
        held = list(tensors)
        async with self._update:
            await self._each("stage", lambda replica: self._took(replica, manifest, held))
            self._staged = manifest
        return manifest.digest

    async def commit(self, version: Version) -> None:
        """Commit on every living replica; one that fails is out, its weights unknown.

        Cancelling waits for all of them: half of the replicas on one version is no state to leave.
        """
        async with self._update:
            if self._staged is None or self._staged.version != version:
                raise WeightsError(
                    f"{version} cannot be committed: it is not staged", expected="stage it first"
                )
            self._unprove()  # before the first replica serves what nobody has proven
            staged, self._staged = self._staged, None
            await _to_the_end(self._each("commit", lambda replica: replica.engine.commit(version)))
            self._served = staged

    @property
    def version(self) -> Version | None:
        """The version that every replica serves; None where they differ or have none.

        One that has died serves nothing, whether or not a request has found that out yet.
        """
        serving = (replica.engine.version for replica in self._living())
        versions = {version for version in serving if version is not None}
        return versions.pop() if len(versions) == 1 else None

    def stats(self) -> EngineStats:
        """Sums over the replicas; ``busy_s`` of all of them."""
        every = [replica.engine.stats() for replica in self._replicas.values()]
        return EngineStats(
            prompt_tokens=sum(s.prompt_tokens for s in every),
            generated_tokens=sum(s.generated_tokens for s in every),
            running=sum(s.running for s in every),
            waiting=sum(s.waiting for s in every),
            busy_s=sum(s.busy_s for s in every),
            reused_tokens=sum(s.reused_tokens for s in every),
        )

    async def close(self) -> None:
        """Close every replica, those that are out too."""
        await asyncio.gather(
            *(replica.engine.close() for replica in self._replicas.values()), return_exceptions=True
        )

    # -- pausing

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Pause every living replica."""
        await self._each("pause", lambda r: _pausable(r).pause(mode))

    async def resume(self) -> None:
        await self._each("resume", lambda r: _pausable(r).resume())

    async def sleep(self) -> None:
        """Put every living replica to sleep; ``start`` wakes them."""
        async with self._update:
            self._unprove()
            self._served = self._staged = None
            await self._each("sleep", lambda r: _sleeper(r).sleep())

    # -- adapters

    async def load_adapter(
        self, name: str, config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]
    ) -> None:
        """Load it on every living replica; requests may name it once all have it."""
        held = list(tensors)
        await self._each("loading an adapter", lambda r: _host(r).load_adapter(name, config, held))

    async def drop_adapter(self, name: str) -> None:
        await self._each("dropping an adapter", lambda r: _host(r).drop_adapter(name))

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names that every living replica knows."""
        known = [set(r.engine.adapters) for r in self._living() if isinstance(r.engine, AdapterHost)]
        return tuple(sorted(set.intersection(*known))) if known else ()

    # -- members

    async def join(
        self, name: str, engine: Engine, proof: Proof, tensors: Iterable[tuple[str, Tensor]]
    ) -> None:
        """Bring a new or restarted engine to the serving version, prove it, and only then route to it.

        ``engine`` must be fresh (not started). Raises WeightsError if the proof is of another
        version than the others serve, or fails; then it is no member, and the caller's to close.
        """
        before = self._replicas.get(name)
        if before is not None and before.alive:
            raise EngineError(f"replica {name} is alive", expected="another name, or remove it first")
        self._check_current(proof.manifest)
        replica = Replica(name, engine)
        await self._started(replica, proof.manifest, tensors)
        gap = _gap(proof.logprobs, await engine.score(proof.token_ids, SamplingParams()))
        if gap > proof.tolerance:
            raise WeightsError(
                f"replica {name} did not prove {proof.manifest.version}: a probe logprob is off by {gap:.3g}",
                expected=f"at most {proof.tolerance:g}",
                next_command="start another engine: this one computes something else",
            )
        async with self._update:  # a sync may have happened meanwhile, or be under way
            self._check_current(proof.manifest)
            if self._staged is not None:
                raise WeightsError(
                    f"{self._staged.version} is staged on the others and not on {name}",
                    expected="a replica joins between two syncs",
                    next_command="commit, then join with the new version's proof",
                )
            replica.proven = True
            self._replicas[name] = replica
            if all(other.proven for other in self._living()):
                self._proven.set()

    def remove(self, name: str) -> Engine:
        """Take a replica out, alive or lost, and return its engine, which the caller closes."""
        if name not in self._replicas:
            raise EngineError(f"there is no replica {name}", expected=f"one of {', '.join(self._replicas)}")
        return self._replicas.pop(name).engine

    # -- inside

    def _check_current(self, manifest: Manifest) -> None:
        if self._served is not None and self._served.digest != manifest.digest:
            raise WeightsError(
                f"the replicas serve {self._served.version}, and the proof is of {manifest.version}",
                expected="the proof and the tensors of the version that serves now",
            )

    def _living(self) -> list[Replica]:
        living = [replica for replica in self._replicas.values() if replica.alive]
        if not living:
            reasons = "\n".join(f"{r.name}: {r.lost}" for r in self._replicas.values())
            raise EngineDead("every replica is gone", expected="at least one that answers", detail=reasons)
        return living

    def _unprove(self) -> None:
        self._epoch += 1
        self._proven.clear()
        for replica in self._replicas.values():
            replica.proven = False

    async def _wait_for_proof(self) -> None:
        """Between a commit and its proof, requests wait."""
        if self._proven.is_set():
            return
        try:
            async with asyncio.timeout(self._proof_s):
                await self._proven.wait()
        except TimeoutError:
            raise VersionNotReady(
                f"no version was proven within {self._proof_s:g} s",
                expected="a score of probe tokens after start or commit, as WeightSync does",
            ) from None

    def _least(self) -> Replica:
        return min(self._living(), key=lambda replica: replica.outstanding)

    def _choose(self, request: GenerateRequest) -> Replica:
        proven = [replica for replica in self._living() if replica.proven]
        able = [replica for replica in proven if _serves(replica.engine.version, request)]
        if not able:
            wanted = request.exact_version if request.exact_version is not None else request.min_version
            serving = ", ".join(sorted({str(r.engine.version) for r in self._living()}))
            raise VersionNotReady(
                f"no replica serves version {wanted}; they serve {serving}",
                next_command="the same request, later",
            )
        idlest = min(able, key=lambda replica: replica.outstanding)
        near = [r for r in able if r.outstanding <= idlest.outstanding + SLACK_TOKENS]
        held = self._sessions.get(request.session) if request.session else None
        chosen = next((r for r in near if r.name == held), None)
        if chosen is None:
            chosen = next((r for r in near if request.prompt_ids in r.prompts), idlest)
        if request.session:
            self._sessions[request.session] = chosen.name
            self._sessions.move_to_end(request.session)
            if len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)
        return chosen

    @contextmanager
    def _counted(self, replica: Replica, request: GenerateRequest) -> Iterator[None]:
        tokens = len(request.prompt_ids) + request.sampling.max_new_tokens
        replica.outstanding += tokens
        replica.prompts[request.prompt_ids] = replica.prompts.get(request.prompt_ids, 0) + 1
        try:
            yield
        finally:
            replica.outstanding -= tokens
            replica.prompts[request.prompt_ids] -= 1
            if not replica.prompts[request.prompt_ids]:
                del replica.prompts[request.prompt_ids]

    def _lose(self, replica: Replica, error: PalestraError) -> None:
        replica.lost = replica.lost or str(error)
        replica.proven = False

    async def _started(
        self, replica: Replica, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]]
    ) -> None:
        _check_digest(replica, manifest, await replica.engine.start(manifest, tensors))

    async def _took(
        self, replica: Replica, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]]
    ) -> None:
        _check_digest(replica, manifest, await replica.engine.stage(manifest, tensors))

    async def _each(self, what: str, work: Callable[[Replica], Awaitable[_T]]) -> dict[str, _T]:
        """The results of all living replicas; who fails is out. If all fail, the first failure is raised."""
        living = self._living()
        results = await asyncio.gather(*(work(replica) for replica in living), return_exceptions=True)
        found: dict[str, _T] = {}
        failures: list[PalestraError] = []
        for replica, result in zip(living, results, strict=True):
            if isinstance(result, Exception):
                failures.append(_named(result, f"{what} on replica {replica.name}"))
            elif isinstance(result, BaseException):
                raise result
            else:
                found[replica.name] = result
        if not found:
            raise failures[0]
        for replica, result in zip(living, results, strict=True):
            if isinstance(result, Exception):
                self._lose(replica, EngineDead(f"{what} failed: {_named(result, what)}"))
        return found


async def _to_the_end(work: Coroutine[Any, Any, object]) -> None:
    """Await ``work`` even when cancelled; the cancellation is raised when it is done."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled


def _named(error: Exception, doing: str) -> PalestraError:
    """``error`` as one that has a boundary."""
    if isinstance(error, PalestraError):
        return error
    return EngineDead(f"{doing} raised {type(error).__name__}: {error}", detail=traceback_of(error))


def _serves(version: Version | None, request: GenerateRequest) -> bool:
    return version is not None and not version_lacking(version, request)


def _gap(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest difference of two sequences' logprobs; infinite where one is not a number or too short."""
    if len(ours) != len(theirs):
        return math.inf
    gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return max((gap if math.isfinite(gap) else math.inf for gap in gaps), default=0.0)


def _check_digest(replica: Replica, manifest: Manifest, received: str) -> None:
    if received != manifest.digest:
        raise WeightsError(
            f"replica {replica.name} received other bytes than {manifest.version} holds",
            expected=f"digest {manifest.digest}",
            where=f"received {received}",
        )


def _pausable(replica: Replica) -> Pausable:
    if not isinstance(replica.engine, Pausable):
        raise EngineError(
            f"replica {replica.name} cannot be paused", expected="an engine with pause and resume"
        )
    return replica.engine


def _sleeper(replica: Replica) -> Sleeper:
    if not isinstance(replica.engine, Sleeper):
        raise EngineError(f"replica {replica.name} cannot sleep", expected="an engine with sleep")
    return replica.engine


def _host(replica: Replica) -> AdapterHost:
    if not isinstance(replica.engine, AdapterHost):
        raise EngineError(f"replica {replica.name} serves no adapters", expected="an engine that loads them")
    return replica.engine


async def keep_replicas(
    router: Router,
    make: Callable[[], Engine],
    proof: Proof,
    tensors: Callable[[], Iterable[tuple[str, Tensor]]],
    *,
    every_s: float = 1.0,
) -> None:
    """Replace lost replicas by new ones that prove the version, until this is cancelled.

    One that cannot be started or proven is closed and tried again after twice the time.
    """
    wait_s = every_s
    while True:
        await asyncio.sleep(wait_s)
        for replica in [replica for replica in router.replicas if not replica.alive]:
            fresh = make()
            try:
                await router.join(replica.name, fresh, proof, tensors())
            except PalestraError as error:
                _LOG.warning("replica %s could not be replaced: %s", replica.name, error)
                await fresh.close()
                wait_s = min(2 * wait_s, 60.0)
                continue
            except BaseException:
                await fresh.close()
                raise
            wait_s = every_s
            await replica.engine.close()


class _Stream:
    """Tells a listener each token once, over several attempts that must sample the same."""

    def __init__(self, on_token: OnToken) -> None:
        self._on_token = on_token
        self._told: list[int] = []
        self.broken = False

    def again(self) -> OnToken:
        at = 0

        def hear(token: int, logprob: float, version: int) -> None:
            nonlocal at
            if at < len(self._told):
                self.broken = self.broken or self._told[at] != token
            elif not self.broken:
                self._told.append(token)
                self._on_token(token, logprob, version)
            at += 1

        return hear
