"""Where each value of a job comes from: five layers, the higher one wins, nothing is silent.

defaults < ``Job(...)`` in Python < TOML files < ``PALESTRA_...`` variables < ``--set``.
Every value of every layer is checked, overridden ones too, and all problems are
raised together in one ConfigError. A name that is no setting is an error in each
layer. `Resolved` keeps, for each setting, the layer that won and those it
overrode. ``palestra train`` lays its layers over a user's file with `overlay`.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from palestra.errors import ConfigError
from palestra.fields import (
    Given,
    caller,
    check_all,
    flatten,
    given_by,
    judge,
    leaves,
    nearest_key,
    short_path,
)
from palestra.job import Job, conflicts, default_name, defaults

Source = Literal["default", "job file", "file", "environment", "--set"]
PREFIX = "PALESTRA_"
DEFAULT_FILE = Path("palestra.toml")
NOT_SETTINGS = frozenset({"PALESTRA_CACHE", "PALESTRA_DEBUG", "PALESTRA_TOKEN", "PALESTRA_VLLM_PYTHON"})
"""Variables of ours that are read elsewhere."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Why a setting has its value."""

    source: Source
    detail: str
    """What to look up: ``train.py:12``, ``palestra.toml:3``, ``--set steps=3``; '' for a default."""
    value: Any
    overridden: tuple[Origin, ...] = ()
    """The lower layers that also gave a value, the highest first; the default is left out."""

    def __str__(self) -> str:
        return self.detail or self.source

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "detail": self.detail,
            "value": plain(self.value),
            "overridden": [origin.to_json() for origin in self.overridden],
        }


@dataclass(frozen=True, slots=True)
class Values:
    """All settings by dotted key, in declaration order; those without a value are absent."""

    values: Mapping[str, Any]
    provenance: Mapping[str, Origin]

    def to_json(self) -> dict[str, Any]:
        """The values as nested plain objects; the environment as the name of its class."""
        nested: dict[str, Any] = {}
        for key, value in self.values.items():
            section, _, name = key.rpartition(".")
            (nested.setdefault(section, {}) if section else nested)[name] = plain(value)
        return nested

    def provenance_json(self) -> dict[str, Any]:
        return {key: origin.to_json() for key, origin in self.provenance.items()}


@dataclass(frozen=True, slots=True)
class Resolved(Values):
    """A job whose every layer was laid and checked; ``job.name`` is never empty."""

    job: Job
    job_file: Path | None = None


def resolve(
    job: Job,
    *,
    files: Sequence[Path] | None = None,
    environ: Mapping[str, str] | None = None,
    sets: Sequence[str] = (),
    job_file: Path | None = None,
) -> Resolved:
    """Lay all layers over ``job``; raises one ConfigError with everything that is wrong.

    ``files`` None means ``./palestra.toml`` where it exists. ``sets`` are texts ``a.b=c``,
    or ``--flag=c`` for a flag that is short for a setting. ``job_file`` None means the
    file that built the job.
    """
    job_file = job_file or _built_in(job)
    found = resolve_values(tuple(given_by(job)), files=files, environ=environ, sets=sets)
    values, provenance = dict(found.values), dict(found.provenance)
    if not values["name"]:
        values["name"] = default_name(job, job_file)
        provenance["name"] = Origin("default", "", values["name"], provenance["name"].overridden)
    changed = {key: values[key] for key, o in provenance.items() if o.source != "default"} | {
        "name": values["name"]
    }
    return Resolved(MappingProxyType(values), MappingProxyType(provenance), _build(changed), job_file)


def resolve_values(
    python: Sequence[Given] = (),
    *,
    files: Sequence[Path] | None = None,
    environ: Mapping[str, str] | None = None,
    sets: Sequence[str] = (),
) -> Values:
    """As ``resolve``, without a job: what the layers say by themselves."""
    problems: list[str] = []
    layers: list[tuple[Source, dict[str, Given]]] = []

    def add(source: Source, given: Sequence[Given]) -> None:
        valid, found = check_all(
            Job, [item for item in given if source == "job file" or _from_text(item, problems)]
        )
        layers.append((source, valid))
        problems.extend(found)

    add("job file", python)
    for path in _files(files):
        add("file", _read_file(path, problems))
    add("environment", _read_environ(os.environ if environ is None else environ, problems))
    for item in _read_sets(sets, problems):  # one layer each: a later one that wins over an earlier is seen
        add("--set", [item])
    values, provenance = _stack(layers)
    for clash in conflicts(values):
        sources = ", ".join(f"{key} from {provenance[key]}" for key in clash.keys)
        problems.append(f"{clash.text} ({sources})")
    if problems:
        raise ConfigError(problems)
    return Values(MappingProxyType(values), MappingProxyType(provenance))


def _stack(layers: Sequence[tuple[Source, dict[str, Given]]]) -> tuple[dict[str, Any], dict[str, Origin]]:
    values, provenance = {}, {}
    fallback = defaults()
    for key in leaves(Job):
        origins: list[Origin] = [
            Origin(source, valid[key].where, valid[key].value)
            for source, valid in reversed(layers)
            if key in valid
        ]
        if origins:
            top, *lower = origins
            provenance[key] = Origin(top.source, top.detail, top.value, tuple(lower))
        elif key in fallback:
            provenance[key] = Origin("default", "", fallback[key])
        else:
            continue
        values[key] = provenance[key].value
    return values, provenance


def _build(changed: Mapping[str, Any]) -> Job:
    nested: dict[str, Any] = {}
    for key, value in changed.items():
        section, _, name = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = value
    return Job(**nested)


def _built_in(job: Job) -> Path | None:
    """The file whose ``Job(...)`` this is, from the line kept with its values."""
    where = next((item.where for item in given_by(job) if item.key == "environment"), "")
    path = Path(where.rpartition(":")[0])
    return path if path.suffix == ".py" and path.is_file() else None


def plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else type(value).__name__


def _from_text(item: Given, problems: list[str]) -> bool:
    """False, with a problem, for a setting that only Python can give."""
    root = item.key.partition(".")[0]
    leaf = leaves(Job).get(root)
    if leaf is None or leaf.settable:
        return True
    problems.append(f"{item.key}: only Python can give it, in Job({root}=...) (from {item.where})")
    return False


# --- TOML files -------------------------------------------------------------------------------------


def _files(files: Sequence[Path] | None) -> Sequence[Path]:
    if files is not None:
        return files
    return (DEFAULT_FILE,) if DEFAULT_FILE.is_file() else ()


def _read_file(path: Path, problems: list[str]) -> list[Given]:
    name = short_path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        tomllib.loads(text)
    except OSError as error:
        problems.append(f"configuration file {name} cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        problems.append(f"configuration file {name} is not UTF-8 text")
    except (ValueError, RecursionError) as error:
        problems.append(f"configuration file {name} is not valid TOML: {error}")
    else:
        return list(_statements(text, name))
    return []


def _statements(text: str, name: str) -> Iterator[Given]:
    """The values of a valid TOML text with their lines.

    tomllib keeps no positions, so the text is cut into statements: lines are added
    until they parse by themselves, which is where a statement ends.
    """
    prefix, start, chunk = "", 0, ""
    for number, line in enumerate(text.split("\n"), start=1):
        start, chunk = (start, f"{chunk}{line}\n") if chunk else (number, f"{line}\n")
        try:
            parsed = tomllib.loads(chunk)
        except tomllib.TOMLDecodeError:
            continue
        if chunk.lstrip().startswith("["):
            prefix, value = _header(parsed)
            yield Given(prefix.removesuffix("."), value, f"{name}:{start}")
        else:
            yield from flatten(parsed, f"{name}:{start}", prefix)
        chunk = ""


def _header(parsed: Mapping[str, Any]) -> tuple[str, Any]:
    """``[a.b]`` as the prefix ``a.b.`` and what it opens: an empty table, or a list for ``[[a.b]]``."""
    path: str = ""
    inner: Any = parsed
    while isinstance(inner, Mapping) and inner:
        ((key, inner),) = inner.items()
        path += f"{key}."
    return path, inner


# --- environment and --set --------------------------------------------------------------------------


def _read_environ(environ: Mapping[str, str], problems: list[str]) -> list[Given]:
    given: list[Given] = []
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in NOT_SETTINGS:
            key = variable.removeprefix(PREFIX).lower().replace("__", ".")
            if any(key == known or known.startswith(f"{key}.") for known in leaves(Job)):
                given.append(Given(key, _parse(key, environ[variable]), variable))
            else:
                close = nearest_key(key, Job).upper().replace(".", "__")
                problems.append(
                    f"{variable}: no such setting" + (f"; nearest: {PREFIX}{close}" if close else "")
                )
    return given


def _read_sets(sets: Sequence[str], problems: list[str]) -> list[Given]:
    given: list[Given] = []
    for text in sets:
        flag = text.startswith("--")
        shown = text if flag else f"--set {text}"
        left, equals, value = text.partition("=")
        key = left.removeprefix("--").replace("-", "_") if flag else left.strip()
        if not equals or not key:
            close = nearest_key(left.split()[0], Job) if left.strip() else ""
            problems.append(
                f"{shown}: expected KEY=VALUE, for example --set {close or 'optimizer.learning_rate'}=..."
            )
            continue
        given.append(Given(key, _parse(key, value), shown))
    return given


def _parse(key: str, text: str) -> Any:
    """What ``text`` means for ``key``, not yet checked; the text itself where nothing can be set there."""
    leaf = leaves(Job).get(key)
    return leaf.parse(text) if leaf and leaf.settable else text


# --- the layers of a command, over a user's file ----------------------------------------------------


class JobSeenError(BaseException):
    """Ends a file that is only looked at, where it would train. No Exception: user code lets it pass."""

    def __init__(self, resolved: Resolved) -> None:
        super().__init__()
        self.resolved = resolved


@dataclass
class Overlay:
    """What a command lays over every ``Job.train()`` of the file it runs, and which runs came of it."""

    files: Sequence[Path] | None = None
    sets: Sequence[str] = ()
    job_file: Path | None = None
    panel: bool | None = None
    """Overrides the ``panel`` of ``Job.train`` where it is not None."""
    look_only: bool = False
    """Raise JobSeenError instead of training."""
    began: bool = False
    """Whether a job resolved and went on to train."""
    runs: list[Any] = field(default_factory=list[Any])
    """The `palestra.run.Run` handles, in the order of their start."""


_active: Overlay | None = None  # module-level, not a contextvar: a job may be trained in another thread


@contextmanager
def overlay(layers: Overlay) -> Iterator[Overlay]:
    """Every job trained inside the block resolves with these layers. Does not nest."""
    global _active
    if _active is not None:
        raise ConfigError(["palestra train was called inside a file that palestra train runs"])
    _active = layers
    try:
        yield layers
    finally:
        _active = None


def active() -> Overlay:
    """The layers that lie over a job trained now; empty ones outside of ``overlay``."""
    return _active or Overlay()


def for_training(job: Job, layers: Overlay, *, steps: int | None) -> Resolved:
    """``job`` as it will run, ``steps`` as if Python had written it; JobSeenError where one only looks."""
    if steps is not None:
        job = _with_steps(job, steps)
    resolved = resolve(job, files=layers.files, sets=layers.sets, job_file=layers.job_file)
    if layers.look_only:
        raise JobSeenError(resolved)
    layers.began = True
    return resolved


def _with_steps(job: Job, steps: int) -> Job:
    where = caller()
    _, problems = judge(Job, {"model": job.model, "environment": job.environment, "steps": steps}, where)
    if problems:
        raise ConfigError(problems)
    return job.replaced(where, steps=steps)
