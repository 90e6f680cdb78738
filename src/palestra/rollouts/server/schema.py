"""Request bodies: strict JSON in, checked objects out, or a refusal that names the field.

A field that would change the answer and that this server does not implement is an
error, never ignored; the few that change nothing are listed (`HARMLESS`). Numbers are
finite, text is valid Unicode, and nothing is converted from one type to another.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from palestra.errors import nearest
from palestra.rollouts.server.errors import Refusal

HARMLESS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
     "prompt_cache_retention", "verbosity")
)  # fmt: skip
"""Fields of OpenAI's API that do not change what this server answers."""
MOST_CHOICES = 128

_Model = TypeVar("_Model", bound="Body")
Count = Annotated[int, Field(ge=0, le=2**53)]
Stop = Annotated[str, Field(max_length=1024)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Without effect: nothing is padded."""


class Sampled(Body):
    """What chat and completions share; the comments of `palestra.types.SamplingParams` hold."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = 1
    stop: Stop | Annotated[list[Stop], Field(max_length=64)] | None = None
    max_tokens: Count | None = None
    min_tokens: Count = 0
    temperature: Annotated[Finite, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    logit_bias: dict[str, Annotated[Finite, Field(ge=-100, le=100)]] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=0, le=0)] | None = None
    return_token_ids: bool = False
    session: str = ""
    min_version: Count | None = None
    exact_version: Count | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        given = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(given):
            raise Refusal(400, "a stop string is empty", param="stop", expected="text, or no stop at all")
        return given

    @property
    def usage_in_stream(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class Function(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class ResponseFormat(Body):
    type: Literal["text"]


class ChatBody(Sampled):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: ResponseFormat | None = None


class CompletionBody(Sampled):
    prompt: str | list[Any]
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None


class SamplingBody(Body):
    """`palestra.types.SamplingParams`, field by field."""

    max_new_tokens: Annotated[int, Field(ge=1)] = 128
    temperature: Annotated[Finite, Field(ge=0)] = 1.0
    top_p: Annotated[Finite, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    stop: Annotated[list[Stop], Field(max_length=64)] = []
    stop_token_ids: list[Count] = []
    seed: int = 0


class GenerateBody(Body):
    """`palestra.rollouts.base.GenerateRequest`, field by field."""

    prompt_ids: list[Count]
    sampling: SamplingBody = SamplingBody()
    id: str = ""
    session: str = ""
    adapter: str = ""
    min_version: Count | None = None
    exact_version: Count | None = None
    min_new_tokens: Count = 0
    logit_bias: dict[str, Finite] = {}
    stream: bool = False


class ScoreBody(Body):
    token_ids: Annotated[list[Count], Field(min_length=1)]
    sampling: SamplingBody = SamplingBody()


def read_body(raw: bytes) -> dict[str, Any]:
    """The body's JSON object. Raises Refusal for anything that is not strict, valid JSON."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        kind = "UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
        raise Refusal(
            400, f"the body is not valid {kind}: {error}", code="invalid_json", expected="one JSON object"
        ) from error
    if not isinstance(value, dict):
        raise Refusal(400, "the body is not a JSON object", code="invalid_json", expected="one JSON object")
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        where = _half_character(value)
        raise Refusal(
            400, f"{where} holds half a character (a lone surrogate)", param=where, expected="valid Unicode"
        ) from None
    return value


def parsed(model: type[_Model], value: dict[str, Any]) -> _Model:
    """``value`` as ``model``. Raises Refusal that names the first field that is wrong."""
    value = {key: part for key, part in value.items() if key not in HARMLESS}
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _refusal(model, value, error) from error


def bias_of(given: dict[str, float] | None) -> dict[int, float]:
    """JSON's keys are texts: as token ids."""
    found: dict[int, float] = {}
    for key, bias in (given or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise Refusal(400, f"logit_bias names {key[:40]!r}", param="logit_bias", expected="token ids")
        found[int(key)] = bias
    return found


def _refusal(model: type[Body], value: dict[str, Any], error: ValidationError) -> Refusal:
    found = error.errors(include_url=False, include_input=False, include_context=False)
    first = min(found, key=lambda e: (_rank(e["type"]), -len(_field([str(p) for p in e["loc"]], value))))
    path = [str(part) for part in first["loc"]]
    fields = sorted(model.model_fields)
    if first["type"] == "extra_forbidden" and len(path) == 1:
        return Refusal(
            400,
            f"there is no field {path[0][:100]!r} here",
            param=path[0][:100],
            code="unknown_parameter",
            expected=", ".join(fields),
            nearest=nearest(path[0], fields),
        )
    if first["type"] == "missing":
        return Refusal(400, f"{'.'.join(path)} is missing", param=path[0], code="missing_required_parameter")
    field = _field(path, value)
    return Refusal(400, f"{field} is not accepted: {first['msg']}", param=field)


def _rank(kind: str) -> int:
    """Of several errors the one that is said: of a union the arm that is not merely another type."""
    return {"extra_forbidden": 0, "missing": 1}.get(kind, 3 if kind.endswith("_type") else 2)


def _field(path: list[str], value: Any) -> str:
    """The path without the arms of unions that pydantic puts into it."""
    kept: list[str] = []
    for part in path:
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            continue
        kept.append(part)
    return ".".join(kept)[:200]


def _half_character(value: Any, path: str = "") -> str:
    """Where the first lone surrogate lies."""
    if isinstance(value, str):
        return "" if all(not 0xD800 <= ord(c) <= 0xDFFF for c in value) else path or "the body"
    if isinstance(value, dict):
        pairs = (
            (f"{path}.{k}".lstrip(".").encode("utf-8", "replace").decode(), k, v) for k, v in value.items()
        )
        return next((f for p, k, v in pairs if (f := _half_character(k, p) or _half_character(v, p))), "")
    if isinstance(value, list):
        pairs_of = ((f"{path}.{i}", v) for i, v in enumerate(value))
        return next((f for p, v in pairs_of if (f := _half_character(v, p))), "")
    return ""


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
