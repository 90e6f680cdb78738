"""One setting: its type in words, its unit, its bounds, and the check that a value passes.

Every way to give a value (Python, TOML, environment, ``--set``) meets the same
`Leaf`, so a value is judged once, in the user's words, whatever its source.
All problems of a call are collected before one ConfigError is raised; pydantic's
own text never reaches the user. This module knows nothing of which settings
exist: `palestra.job` declares them, `palestra.settings` layers them.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import sys
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    Strict,
    StringConstraints,
    TypeAdapter,
)
from pydantic import ValidationError as PydanticError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from palestra.errors import ConfigError

Whole = Annotated[int, Strict()]
Real = Annotated[float, Strict(), AllowInfNan(False)]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]
Strings = tuple[Annotated[str, Strict(), StringConstraints(min_length=1)], ...]
Folder = Annotated[Path, AfterValidator(Path.expanduser)]

Kind = Literal["int", "float", "bool", "str", "path", "choice", "strings", "object"]
_KINDS: dict[Any, Kind] = {int: "int", float: "float", bool: "bool", str: "str", Path: "path"}
_WORDS: dict[Kind, str] = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "path": "a path",
    "strings": "a list of non-empty strings",
}
_YES, _NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_SHOWN_CHARS = 80
REQUIRED = PydanticUndefined
"""The default of a setting that has none."""


def setting(default: Any, what: str, unit: str, *, why: str = "", words: str = "", **bounds: Any) -> Any:
    """A pydantic field with its unit in the description.

    ``why`` explains its bounds to who breaks them; ``words`` replaces the type in messages.
    """
    extra: dict[str, Any] = {"unit": unit, "why": why, "words": words}
    return Field(default, description=f"{what} [{unit}]", json_schema_extra=extra, **bounds)


def toml_text(value: object) -> str:
    """A value as TOML writes it, on one line and printable; what TOML has no word for as Python shows it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, Path)):
        return '"' + "".join(map(_escaped, str(value))) + '"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    return re.sub(r" at 0x[0-9a-f]+", "", " ".join(repr(value).split()))  # an address tells a reader nothing


_SHORT = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def _escaped(char: str) -> str:
    if char in _SHORT:
        return _SHORT[char]
    if char.isprintable():
        return char
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


def show(value: object) -> str:
    """``toml_text``, cut to what fits into a message."""
    text = toml_text(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


class BadValueError(ValueError):
    """Why a value is refused, without its key or source; ``hint`` names a value that is valid, or is ''."""

    def __init__(self, expected: str, *, why: str = "", hint: str = "") -> None:
        super().__init__(expected)
        self.expected = expected
        self.why = why
        self.hint = hint


@dataclass(frozen=True)
class Leaf:
    """A setting that holds a value (a section holds leaves)."""

    key: str
    """Dotted: ``optimizer.learning_rate``."""
    info: FieldInfo

    @cached_property
    def kind(self) -> Kind:
        annotation = self.info.annotation
        if get_origin(annotation) is Literal:
            return "choice"
        if get_origin(annotation) is tuple:
            return "strings"
        return _KINDS.get(annotation, "object")

    @property
    def default(self) -> Any:
        return self.info.default

    @property
    def description(self) -> str:
        return self.info.description or ""

    @property
    def unit(self) -> str:
        return str(self._extra.get("unit", ""))

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.info.annotation) if self.kind == "choice" else ()

    @property
    def settable(self) -> bool:
        """Whether text (a file, the environment, ``--set``) can give it."""
        return self.kind != "object"

    @property
    def _extra(self) -> Mapping[str, Any]:
        extra = self.info.json_schema_extra
        return extra if isinstance(extra, dict) else {}

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        annotation: Any = self.info.annotation
        for constraint in self.info.metadata:
            annotation = Annotated[annotation, constraint]
        return TypeAdapter(annotation)

    @cached_property
    def expected(self) -> str:
        """The type and bounds in words: ``a whole number >= 1``."""
        if self._extra.get("words"):
            return str(self._extra["words"])
        if self.kind == "choice":
            return "one of " + ", ".join(self.choices)
        if self.kind == "object":
            name = getattr(self.info.annotation, "__name__", str(self.info.annotation))
            return f"{'an' if name[0] in 'AEIOU' else 'a'} {name} instance"
        return _WORDS[self.kind] + _range(self.info.metadata)

    def parse(self, text: str) -> Any:
        """``text`` as a TOML value, or as a plain string where the setting is one; not yet checked."""
        value = _toml_value(text)
        if self.kind in ("str", "path", "choice"):
            return value if isinstance(value, str) else text
        if value is None and self.kind == "float":
            return _float_or(text)
        return text if value is None else value

    def check(self, value: object) -> Any:
        """The value as the job will hold it; raises BadValueError."""
        if self.kind == "object":
            return self._check_object(value)
        try:
            return self._adapter.validate_python(value)
        except PydanticError as error:
            first = error.errors(include_url=False)[0]
            in_range = first["type"] in ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
            why = str(self._extra.get("why", "")) if in_range else ""
            raise BadValueError(self.expected, why=why, hint=self._hint(value)) from None

    def _check_object(self, value: object) -> object:
        wanted = self.info.annotation
        if isinstance(wanted, type) and isinstance(value, wanted):
            return value
        if isinstance(value, type) and isinstance(wanted, type) and issubclass(value, wanted):
            raise BadValueError(self.expected, hint=f"nearest: {value.__name__}()")
        raise BadValueError(self.expected)

    def _hint(self, value: object) -> str:
        close = self._nearest(value)
        if close:
            return f"nearest: {close}"
        return f"default: {show(self.default)}" if self.kind in ("int", "float", "bool", "choice") else ""

    def _nearest(self, value: object) -> str:
        """The valid value closest to a refused one, or ''."""
        if self.kind == "choice":
            return _close(str(value).lower(), self.choices)
        if self.kind == "strings" and isinstance(value, str):
            return show([value])
        if self.kind == "bool":
            word = str(value).lower()
            return "true" if word in _YES else "false" if word in _NO else ""
        if self.kind in ("int", "float"):
            return self._nearest_number(value)
        return self._nearest_text(value) if self.kind == "str" else ""

    def _nearest_text(self, value: object) -> str:
        if not isinstance(value, (str, int, float)):
            return ""
        text = re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).strip("-._")
        return show(text) if text and self._accepts(text) else ""

    def _nearest_number(self, value: object) -> str:
        number = _float_or(value) if isinstance(value, str) else value
        if isinstance(number, bool) or not isinstance(number, (int, float)) or number != number:
            return ""
        low, high = _bound(self.info.metadata, "ge"), _bound(self.info.metadata, "le")
        number = number if low is None else max(number, low)
        number = number if high is None else min(number, high)
        if number in (math.inf, -math.inf) or (isinstance(number, int) and number.bit_length() > 63):
            return ""
        number = round(number) if self.kind == "int" else float(number)
        return show(number) if self._accepts(number) else ""

    def _accepts(self, value: object) -> bool:
        try:
            self._adapter.validate_python(value)
        except PydanticError:
            return False
        return True


def _bound(metadata: list[Any], name: str) -> Any:
    return next((getattr(item, name) for item in metadata if hasattr(item, name)), None)


def _range(metadata: list[Any]) -> str:
    ge, gt, le, lt = (_bound(metadata, name) for name in ("ge", "gt", "le", "lt"))
    low, high = ge if gt is None else gt, le if lt is None else lt
    if low is not None and high is not None:
        return f" in {'[' if gt is None else '('}{low}, {high}{']' if lt is None else ')'}"
    if low is not None:
        return f" {'>=' if gt is None else '>'} {low}"
    return "" if high is None else f" {'<=' if lt is None else '<'} {high}"


def _toml_value(text: str) -> Any:
    """``text`` as one TOML value; None where it is not one (TOML has no null)."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # not TOML, or numbers and nesting beyond what Python reads
        return None
    value = parsed["value"]
    return None if len(parsed) != 1 or isinstance(value, dict) else value


def _float_or(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


class Section(BaseModel):
    """Settings that belong together. Wrong arguments raise one ConfigError with the caller's line."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)
    _given: dict[str, str] = PrivateAttr(default_factory=dict[str, str])
    """Field name -> ``file:line`` of the call that gave it."""

    if not TYPE_CHECKING:  # the type checker keeps the generated signature

        def __init__(self, /, **values: Any) -> None:
            where = caller()
            valid, problems = judge(type(self), values, where)
            problems += self._disagreements(valid)
            if problems:
                raise ConfigError(problems)
            super().__init__(**values)
            self._given = dict.fromkeys(values, where)

        def __setattr__(self, name: str, value: Any) -> None:
            if name in type(self).model_fields:
                kind = type(self).__name__
                article = "an" if kind[0] in "AEIOU" else "a"
                text = f"{article} {kind} cannot be changed once built; give {name} to {kind}(...)"
                raise ConfigError([f"{name}: {text} (at {caller()})"])
            super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        """Same kind and same values, wherever they were written."""
        if type(other) is not type(self):
            return NotImplemented
        return self._values() == other._values()  # type: ignore[attr-defined]  # same type

    def __hash__(self) -> int:
        return hash(self._values())

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in type(self).model_fields)

    def replaced(self, where: str, **values: Any) -> Self:
        """A copy with other, already judged, values that ``where`` gave."""
        copy = self.model_copy(update=values)
        copy._given = {**self._given, **dict.fromkeys(values, where)}
        return copy

    @classmethod
    def _disagreements(cls, values: Mapping[str, Any]) -> list[str]:
        """Problems between valid values (dotted keys) that were given together."""
        return []


@dataclass(frozen=True, slots=True)
class Given:
    """One value for one setting, from one place."""

    key: str
    value: Any
    where: str
    """What the user can look up: ``train.py:12``, ``palestra.toml:3``, ``PALESTRA_STEPS``, ``--set a=3``."""


def section_of(info: FieldInfo) -> type[Section] | None:
    """The section class of a field that is one."""
    inner = info.annotation
    return inner if isinstance(inner, type) and issubclass(inner, Section) else None


@cache
def leaves(section: type[Section]) -> Mapping[str, Leaf]:
    """Every leaf below ``section``, by dotted key, in declaration order."""
    found: dict[str, Leaf] = {}
    for name, info in section.model_fields.items():
        inner = section_of(info)
        if inner:
            for key, leaf in leaves(inner).items():
                found[f"{name}.{key}"] = Leaf(f"{name}.{key}", leaf.info)
        else:
            found[name] = Leaf(name, info)
    return types.MappingProxyType(found)


def given_by(section: Section) -> Iterator[Given]:
    """What the user wrote to build ``section``, with the line of each value; defaults are left out."""
    for name in type(section).model_fields:
        if name not in section.model_fields_set:
            continue
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from (Given(f"{name}.{inner.key}", inner.value, inner.where) for inner in given_by(value))
        else:
            yield Given(name, value, section._given.get(name, "Python"))


def flatten(values: Mapping[str, Any], where: str, prefix: str = "") -> Iterator[Given]:
    """Nested mappings (and built sections) as dotted keys."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Section):
            inner = [Given(f"{key}.{item.key}", item.value, item.where) for item in given_by(value)]
        elif isinstance(value, Mapping):
            inner = list(flatten(value, where, f"{key}."))
        else:
            inner = []
        yield from inner or [Given(key, value, where)]


def judge(section: type[Section], values: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """The valid ones of ``values`` by dotted key, and all that is wrong with building ``section`` so."""
    valid: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in values.items():
        info = section.model_fields.get(name)
        inner = section_of(info) if info else None
        if inner and isinstance(value, Section) and not isinstance(value, inner):
            got = type(value).__name__
            problems.append(f"{name}: expected {inner.__name__}(...) or a dict, got {got}(...) from {where}")
        else:
            good, bad = check_all(section, flatten({name: value}, where))
            valid |= {key: item.value for key, item in good.items()}
            problems += bad
    missing = [n for n, info in section.model_fields.items() if info.is_required() and n not in values]
    problems.extend(
        f"{name}: required, and not given to {section.__name__}(...) at {where}; "
        f"expected {leaves(section)[name].expected}"
        for name in missing
    )
    return valid, problems


def check_all(section: type[Section], given: Iterable[Given]) -> tuple[dict[str, Given], list[str]]:
    """The last valid value of each key, and one problem for every value that is not valid."""
    table = leaves(section)
    valid: dict[str, Given] = {}
    problems: list[str] = []
    wrong_headers: list[str] = []
    for item in given:
        leaf = table.get(item.key)
        if leaf is None:
            said = any(item.key.startswith(f"{header}.") for header in wrong_headers)
            if not said and not _empty_section(section, item):
                problems.append(unknown(section, item))
                wrong_headers += [item.key] if item.value == {} else []
            continue
        try:
            valid[item.key] = Given(item.key, leaf.check(item.value), item.where)
        except BadValueError as error:
            problems.append(refusal(item, error))
    return valid, problems


def _empty_section(section: type[Section], item: Given) -> bool:
    nothing = isinstance(item.value, Section) or item.value == {}
    return nothing and any(key.startswith(f"{item.key}.") for key in leaves(section))


def refusal(item: Given, error: BadValueError) -> str:
    """One line: the setting, what it must be, what it was, where from, why, and the nearest valid value."""
    text = f"{item.key}: expected {error.expected}, got {show(item.value)} from {item.where}"
    text += f" ({error.why})" if error.why else ""
    return text + (f"; {error.hint}" if error.hint else "")


def unknown(section: type[Section], item: Given) -> str:
    """The problem of a key that is no setting, with the nearest one that is."""
    table = leaves(section)
    inside = [key for key in table if key.startswith(f"{item.key}.")]
    if inside:
        parts = ", ".join(key.removeprefix(f"{item.key}.") for key in inside)
        return f"{item.key}: is a section, got {show(item.value)} from {item.where}; its settings: {parts}"
    owner = next((key for key in table if item.key.startswith(f"{key}.")), None)
    if owner:
        return f"{item.key}: {owner} is one value and has no parts (from {item.where}); nearest: {owner}"
    close = nearest_key(item.key, section)
    return f"{item.key}: no such setting (from {item.where})" + (f"; nearest: {close}" if close else "")


_OTHER_NAMES = {
    "lr": "learning_rate",
    "num_generations": "group_size",
    "n": "group_size",
    "max_tokens": "max_new_tokens",
    "max_completion_length": "max_new_tokens",
    "batch_size": "prompts_per_step",
    "max_steps": "steps",
    "num_steps": "steps",
    "max_grad_norm": "grad_clip",
    "output_dir": "runs_dir",
    "env": "environment",
    "reward": "environment",
}
"""What other frameworks call a setting: only ever used to suggest ours."""


def nearest_key(key: str, section: type[Section]) -> str:
    """What a wrong key most likely meant: same last word, another framework's word, or close letters."""
    known = list(leaves(section))
    groups = {name.partition(".")[0] for name in known if "." in name}
    lowered = key.lower()
    for group in groups:  # PALESTRA_OPTIMIZER_LR for PALESTRA_OPTIMIZER__LR
        lowered = re.sub(f"^{group}_", f"{group}.", lowered)
    last = lowered.rpartition(".")[2]
    last = _OTHER_NAMES.get(last, last)
    same_last = [name for name in known if name.rpartition(".")[2] == last]
    if same_last:
        return _close(lowered, same_last, cutoff=0.0)
    by_last = {name.rpartition(".")[2]: name for name in known}
    meant = by_last | {name: name for name in (*known, *groups)}
    return meant.get(_close(lowered, list(meant)) or _close(last, list(by_last)), "")


def _close(name: str, valid: Sequence[str], cutoff: float = 0.6) -> str:
    found = difflib.get_close_matches(name, valid, n=1, cutoff=cutoff)
    return found[0] if found else ""


def caller() -> str:
    """``file:line`` of the innermost frame outside this package's declarations and pydantic."""
    frame = sys._getframe(1)  # inspect.stack() would read every source file
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        ours = (__name__, "palestra.job", "palestra.presets", "palestra.settings")
        if module not in ours and not module.startswith("pydantic"):
            return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return "Python"


def short_path(path: str | Path) -> str:
    """Relative to the working directory where the file lies below it."""
    full, here = os.path.abspath(path), os.getcwd() + os.sep
    return full.removeprefix(here) if os.path.exists(full) else str(path)
