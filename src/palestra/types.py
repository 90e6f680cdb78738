"""The nouns that cross rooms, as frozen objects that cannot be built wrong.

This module does no I/O, holds no engine and imports no framework and nothing of
palestra, so everything else may import it. Every constructor checks its
invariants: lengths that must agree do agree, numbers that must be finite are
finite, members of one group answered one task. Whoever holds one of these
objects never has to check it again. Logprobs are natural logarithms. What is
made of them for the trainer lies in `palestra.batches`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

UNVERSIONED = -1
"""The version tag of a token that no policy sampled (prompt, tool output)."""


class StopReason(StrEnum):
    """Why a turn ended. Closed: metrics count every member, and no other exists."""

    EOS = "eos"
    """The model sampled an end-of-sequence token."""
    STOP = "stop"
    """A stop string or stop token of the request matched."""
    LENGTH = "length"
    """``max_new_tokens`` was reached."""
    CONTEXT = "context"
    """The model's context window was full."""
    ABORTED = "aborted"
    """The request was cancelled; its tokens so far are kept."""


class Boundary(StrEnum):
    """The room in which a failure belongs. Closed, and mirrored into metrics."""

    TASK = "task"
    REWARD = "reward"
    CHAT = "chat"
    ENGINE = "engine"
    SANDBOX = "sandbox"
    TRAINER = "trainer"
    WEIGHTS = "weights"
    CLUSTER = "cluster"
    RECORD = "record"


Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _real(value: object, what: str) -> float:
    """``value`` as a finite float; bool counts as 0 or 1, everything else must be a number."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"{what} must be a number, got {type(value).__name__}: {value!r}")
    number = float(value)  # type: ignore[arg-type]  # __float__ was just checked
    _require(math.isfinite(number), f"{what} must be finite, got {number}")
    return number


def _shortened(text: str, most: int) -> str:
    """``text``, or its beginning and end: user code may raise megabytes."""
    return text if len(text) <= most else f"{text[: most // 2]} [...] {text[-most // 2 :]}"


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat, as the template sees it."""

    role: Role
    content: str

    def __post_init__(self) -> None:
        _require(self.role in ROLES, f"role must be one of {', '.join(ROLES)}, got {self.role!r}")
        if not isinstance(self.content, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"content must be str, got {type(self.content).__name__}")


_TASK_FIELDS = ("prompt", "messages", "data", "secret", "id")


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. ``secret`` is for the grader: it never enters a prompt or a sandbox.

    Give either ``prompt`` (one user message) or ``messages`` (a whole chat). ``id``
    defaults to the first 12 digits of ``hash``, which binds a group's members
    together: it covers prompt, messages, data and secret.
    """

    prompt: str | None = None
    messages: tuple[Message, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    secret: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    id: str = ""
    _hash: str = field(default="", init=False, repr=False, compare=False)

    if not TYPE_CHECKING:  # the type checker keeps the generated signature

        def __new__(cls, *values: Any, **named: Any) -> Task:
            unknown = [name for name in named if name not in _TASK_FIELDS]
            if unknown:
                name = repr(unknown[0])
                raise TypeError(
                    f"a Task has no {name}; it takes {', '.join(_TASK_FIELDS)}. What the grader needs goes "
                    f"into secret: secret={{{name}: ...}}, read as task.secret[{name}]"
                )
            return object.__new__(cls)

    def __post_init__(self) -> None:
        if self.prompt is not None and not isinstance(self.prompt, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"prompt must be str, got {type(self.prompt).__name__}")
        _require(
            (self.prompt is not None) != bool(self.messages),
            "a task needs either prompt or messages, and not both",
        )
        _require(self.prompt is None or bool(self.prompt.strip()), "prompt must not be empty")
        object.__setattr__(self, "messages", tuple(self.messages))
        object.__setattr__(self, "data", MappingProxyType(dict(self.data)))
        object.__setattr__(self, "secret", MappingProxyType(dict(self.secret)))
        content = [self.prompt, [[m.role, m.content] for m in self.messages], {**self.data}, {**self.secret}]
        try:
            digest = hashlib.sha256(_canonical(content).encode()).hexdigest()
        except (TypeError, ValueError) as error:
            raise TypeError(f"a task's data and secret must be plain JSON values: {error}") from None
        object.__setattr__(self, "_hash", digest)
        if not self.id:
            object.__setattr__(self, "id", digest[:12])

    @property
    def hash(self) -> str:
        """64 hex digits of SHA-256 over everything but the id, as the task was built."""
        return self._hash

    @property
    def chat(self) -> tuple[Message, ...]:
        """The task as messages: ``messages``, or ``prompt`` as one user message."""
        return self.messages or (Message("user", self.prompt or ""),)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is sampled. Temperature 0 is greedy; top_p 1 and top_k 0 are off."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    """Strings that end the completion; the matching tokens are kept in it."""
    stop_token_ids: tuple[int, ...] = ()
    """Further token ids that end the completion, beside the model's end-of-sequence ids."""
    seed: int = 0
    """Same seed, same weights, same prompt: same tokens."""

    def __post_init__(self) -> None:
        _require(self.max_new_tokens >= 1, f"max_new_tokens must be >= 1, got {self.max_new_tokens}")
        _real(self.temperature, "temperature")
        _require(self.temperature >= 0, f"temperature must be >= 0, got {self.temperature}")
        _require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        _require(self.top_k >= 0, f"top_k must be >= 0 (0 is off), got {self.top_k}")
        _require(not isinstance(self.stop, str), "stop must be a tuple of strings, not one string")
        _require(all(self.stop), "a stop string must not be empty")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled: each token with its logprob and the policy version that chose it.

    ``logprobs`` are those of the distribution actually sampled from: after
    temperature, top-k and top-p.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    stop_reason: StopReason

    def __post_init__(self) -> None:
        _check_columns(self.token_ids, self.logprobs, self.versions, (True,) * len(self.token_ids))


def _check_columns(
    tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], mask: Sequence[bool]
) -> None:
    lengths = (len(tokens), len(logprobs), len(versions), len(mask))
    _require(
        len(set(lengths)) == 1,
        "token_ids, logprobs, versions and sampled_mask must have one length, got "
        f"{lengths[0]}, {lengths[1]}, {lengths[2]} and {lengths[3]}",
    )
    for index, (token, logprob, version, sampled) in enumerate(
        zip(tokens, logprobs, versions, mask, strict=True)
    ):
        _require(token >= 0, f"token_ids[{index}] is negative: {token}")
        _require(math.isfinite(logprob), f"logprobs[{index}] is not finite: {logprob}")
        _require(logprob <= 1e-4, f"logprobs[{index}] is above 0: {logprob}")
        if sampled:
            _require(version >= 0, f"versions[{index}]: a sampled token needs a policy version")
        else:
            _require(
                version == UNVERSIONED,
                f"versions[{index}]: a token nobody sampled carries {UNVERSIONED}, got {version}",
            )


@dataclass(frozen=True, slots=True)
class Turn:
    """A run of tokens of one role. Only tokens with ``sampled_mask`` true can ever be trained.

    An assistant turn may end in tokens that the template adds and nobody sampled
    (mask false, logprob 0, version -1). ``stop_reason`` is set exactly when
    something was sampled.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampled_mask: tuple[bool, ...]
    versions: tuple[int, ...]
    stop_reason: StopReason | None
    role: Role

    def __post_init__(self) -> None:
        _require(self.role in ROLES, f"role must be one of {', '.join(ROLES)}, got {self.role!r}")
        _check_columns(self.token_ids, self.logprobs, self.versions, self.sampled_mask)
        sampled = any(self.sampled_mask)
        _require(not sampled or self.role == "assistant", f"a {self.role} turn cannot hold sampled tokens")
        _require(
            not sampled or self.stop_reason is not None, "a turn with sampled tokens needs a stop_reason"
        )

    @classmethod
    def given(cls, token_ids: Sequence[int], role: Role = "user") -> Turn:
        """A turn that nobody sampled: a prompt, a tool's answer, template text."""
        n = len(token_ids)
        return cls(tuple(token_ids), (0.0,) * n, (False,) * n, (UNVERSIONED,) * n, None, role)

    @classmethod
    def sampled(cls, completion: Completion) -> Turn:
        """An assistant turn made of exactly what the engine sampled."""
        mask = (True,) * len(completion.token_ids)
        return cls(
            completion.token_ids,
            completion.logprobs,
            mask,
            completion.versions,
            completion.stop_reason,
            "assistant",
        )


@dataclass(frozen=True, slots=True)
class Reward:
    """A verdict: a finite number. Whether it lies in the declared range the environment checks."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _real(self.value, "a reward"))
        parts = {name: _real(part, f"reward part {name!r}") for name, part in self.parts.items()}
        object.__setattr__(self, "parts", MappingProxyType(parts))


@dataclass(frozen=True, slots=True)
class Abstain:
    """No verdict, and why. Never counted as 0: it leaves every baseline unmoved."""

    reason: str
    boundary: Boundary = Boundary.REWARD
    detail: str = field(default="", repr=False)
    """The full traceback or output behind the reason."""
    where: str = ""
    """``file:line`` to look at, where one is known; the reason ends with it."""
    expected: str = ""
    """What would have been a verdict, where that is known."""

    def __post_init__(self) -> None:
        _require(bool(self.reason.strip()), "an abstention needs a reason")
        object.__setattr__(self, "reason", _shortened(self.reason, 1_000))
        object.__setattr__(self, "detail", _shortened(self.detail, 20_000))
        object.__setattr__(self, "boundary", Boundary(self.boundary))


Outcome = Reward | Abstain


@dataclass(frozen=True, slots=True)
class Span:
    """A named interval of an episode, in seconds of the monotonic clock."""

    name: str
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        finite = math.isfinite(self.start_s) and math.isfinite(self.end_s)
        _require(finite and self.end_s >= self.start_s, f"span {self.name!r} ends before it starts")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished episode: its turns in order, and its outcome.

    Joining the turns' tokens gives exactly what the engine saw.
    """

    id: str
    task_hash: str
    turns: tuple[Turn, ...]
    outcome: Outcome
    spans: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        _require(bool(self.id), "a trajectory needs an id")
        _require(bool(self.task_hash), "a trajectory needs its task's hash")
        object.__setattr__(self, "turns", tuple(self.turns))
        object.__setattr__(self, "spans", tuple(self.spans))
        if isinstance(self.outcome, Reward):
            _require(self.sampled_count > 0, "a rewarded trajectory must hold at least one sampled token")

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for turn in self.turns for token in turn.token_ids)

    @property
    def sampled_mask(self) -> tuple[bool, ...]:
        return tuple(flag for turn in self.turns for flag in turn.sampled_mask)

    @property
    def logprobs(self) -> tuple[float, ...]:
        return tuple(value for turn in self.turns for value in turn.logprobs)

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(version for turn in self.turns for version in turn.versions)

    @property
    def sampled_count(self) -> int:
        """How many of the tokens a policy sampled."""
        return sum(sum(turn.sampled_mask) for turn in self.turns)

    @property
    def stop_reason(self) -> StopReason | None:
        """The last turn's reason that has one."""
        return next((t.stop_reason for t in reversed(self.turns) if t.stop_reason is not None), None)


@dataclass(frozen=True, slots=True)
class Group:
    """Samples of one task, compared with each other. ``id`` is given when sampling begins.

    Groups may be ragged (abstentions leave) and may be singletons; what their
    advantage is then, `palestra.algorithms.advantages` defines.
    """

    id: str
    task_hash: str
    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        _require(bool(self.id), "a group needs an id")
        object.__setattr__(self, "trajectories", tuple(self.trajectories))
        _require(bool(self.trajectories), f"group {self.id} holds no trajectory")
        ids = [t.id for t in self.trajectories]
        _require(len(set(ids)) == len(ids), f"group {self.id} holds a trajectory twice")
        for trajectory in self.trajectories:
            _require(
                trajectory.task_hash == self.task_hash,
                f"group {self.id} is of task {self.task_hash[:12]}, but trajectory {trajectory.id} "
                f"answered task {trajectory.task_hash[:12]}",
            )

    @property
    def rewarded(self) -> tuple[Trajectory, ...]:
        """The members with a reward; abstentions are left out."""
        return tuple(t for t in self.trajectories if isinstance(t.outcome, Reward))

    @property
    def rewards(self) -> tuple[float, ...]:
        """The rewards of ``rewarded``, in its order."""
        return tuple(t.outcome.value for t in self.trajectories if isinstance(t.outcome, Reward))


_VERSION = re.compile(r"(?P<run>[A-Za-z0-9][A-Za-z0-9._-]*)@(?P<number>0|[1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class Version:
    """The n-th weights of one run, written ``run@n``; n is 0 for the model it started from."""

    run: str
    number: int

    def __post_init__(self) -> None:
        _require(
            _VERSION.fullmatch(str(self)) is not None,
            f"a version is written run@number, with a run of letters, digits, '.', '_' or '-'; got {self}",
        )

    def __str__(self) -> str:
        return f"{self.run}@{self.number}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """The version written as ``run@number``; anything else raises ValueError."""
        match = _VERSION.fullmatch(text)
        if match is None:
            raise ValueError(f"not a version: {text!r} (expected run@number, for example quickstart@3)")
        return cls(match["run"], int(match["number"]))


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a manifest, under its Hugging Face name."""

    name: str
    dtype: str
    """As safetensors writes it: F32, BF16, ..."""
    shape: tuple[int, ...]
    nbytes: int
    digest: str
    """32 hex digits of XXH3-128 over the tensor's bytes in row-major order."""

    def __post_init__(self) -> None:
        _require(bool(self.name), "a tensor needs a name")
        _require(
            not self.name.startswith("/") and ".." not in self.name.split("/"),
            f"tensor name {self.name!r} would leave its folder",
        )
        _require(self.nbytes >= 0 and all(n >= 0 for n in self.shape), f"tensor {self.name}: negative size")
        object.__setattr__(self, "shape", tuple(self.shape))


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a version consists of. ``digest`` covers every tensor's name, dtype, shape and digest."""

    version: Version
    kind: Literal["full", "delta", "lora"]
    base: Version | None
    """The version a delta or an adapter applies to; None for a full one."""
    tensors: tuple[TensorEntry, ...]
    digest: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(self.tensors))
        names = [entry.name for entry in self.tensors]
        _require(len(set(names)) == len(names), "a manifest names a tensor twice")
        full = self.kind == "full"
        _require((self.base is None) == full, f"a {self.kind} manifest cannot have base {self.base}")
        same_run = self.base is None or self.base.run == self.version.run
        _require(same_run, f"manifest {self.version} has a base of another run: {self.base}")
        expected = self.digest_of(self.tensors)
        if not self.digest:
            object.__setattr__(self, "digest", expected)
        _require(self.digest == expected, f"manifest {self.version}: its digest does not match its tensors")

    @staticmethod
    def digest_of(tensors: Sequence[TensorEntry]) -> str:
        """64 hex digits of SHA-256 over the entries in the order of their names."""
        rows = sorted([e.name, e.dtype, list(e.shape), e.nbytes, e.digest] for e in tensors)
        return hashlib.sha256(_canonical(rows).encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors)

    def to_json(self) -> dict[str, Any]:
        tensors = [[e.name, e.dtype, list(e.shape), e.nbytes, e.digest] for e in self.tensors]
        base = str(self.base) if self.base else None
        named = {"version": str(self.version), "kind": self.kind, "base": base, "digest": self.digest}
        return {**named, "tensors": tensors}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Manifest:
        """The manifest that ``to_json`` wrote; raises ValueError where anything is missing or wrong."""
        try:
            tensors = tuple(TensorEntry(n, d, tuple(s), b, g) for n, d, s, b, g in value["tensors"])
            base = Version.parse(value["base"]) if value["base"] else None
            return cls(Version.parse(value["version"]), value["kind"], base, tensors, value["digest"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a manifest: {error}") from error
