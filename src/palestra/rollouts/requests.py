"""What makes a request impossible, the same for every engine: its tokens, length, version and adapter.

Pure checks with one wording; an engine adds only what is its own (a cache too small,
a temperature its server changes). Nothing here knows an engine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from palestra.errors import nearest
from palestra.rollouts.base import GenerateRequest, RequestRefused, VersionNotReady
from palestra.types import Version


def check_tokens(tokens: Sequence[int], label: str, vocabulary: int) -> None:
    """RequestRefused where there is no token, or one outside the vocabulary."""
    if not tokens:
        raise RequestRefused(f"{label} is empty", expected="at least one token")
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        index = next(i for i, token in enumerate(tokens) if not 0 <= token < vocabulary)
        raise RequestRefused(
            f"{label} holds token {tokens[index]}, which the model does not have",
            where=f"position {index}",
            expected=f"tokens from 0 to {vocabulary - 1}",
        )


def too_long(length: int, label: str, *, context: int, limit: int, model_limit: int) -> RequestRefused:
    """The error for ``length`` tokens where ``limit`` fit; says so if the model itself allows more."""
    raise_it = f", or raise context_tokens (the model allows {model_limit})" if context < model_limit else ""
    return RequestRefused(
        f"{label} has {length} tokens and the context is {context}",
        expected=f"at most {limit} tokens",
        next_command=f"shorten it{raise_it}",
    )


def version_lacking(serving: Version | None, request: GenerateRequest) -> str:
    """Which version the request asks for and ``serving`` is not; empty where it will do."""
    number = -1 if serving is None else serving.number
    if request.min_version is not None and number < request.min_version:
        return f"at least version {request.min_version}"
    if request.exact_version not in (None, number):
        return f"version {request.exact_version}"
    return ""


def not_ready(serving: Version | None, expected: str) -> VersionNotReady:
    return VersionNotReady(
        f"the engine serves {serving}", expected=expected, next_command="the same request, later"
    )


def no_adapter(name: str, loaded: Collection[str]) -> RequestRefused:
    return RequestRefused(
        f"no adapter named {name!r} is loaded",
        expected=f"one of {', '.join(sorted(loaded))}" if loaded else "a loaded adapter",
        nearest=nearest(name, loaded),
        next_command="await engine.load_adapter(name, config, tensors)",
    )
