"""Chats as token ids, through the model's own template, without ever re-encoding what was sampled.

The first prompt is the template's rendering, encoded once. What comes after a
sampled turn is a difference of two renderings in which every assistant message is
a placeholder: it depends on the template, the roles and the other messages, never
on sampled text. If the template does not merely append (it drops or rewrites what
was already said), that difference does not exist and ChatError says so: a model
would be trained on a context that it never meets.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

from palestra.errors import ChatError, MissingExtraError, boundary
from palestra.types import Boundary, Message

try:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ModuleNotFoundError as missing:
    raise MissingExtraError("jinja2", "torch") from missing


class ChatTokenizer(Protocol):
    """The part of `palestra.models.tokenizer.Tokenizer` that a chat needs."""

    @property
    def chat_template(self) -> str | None: ...
    @property
    def special_tokens(self) -> dict[str, str]: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class Chat:
    """One model's way of writing a chat.

    ``template`` is ``auto`` (the tokenizer's own), ``none`` (raw text: the messages'
    contents joined as they are), a file, or the text of a template. ``now`` is what
    templates that print a date see, fixed for the life of the object.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, template: str | Path = "auto", *, now: datetime | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.name, source = _source(tokenizer, template)
        self._template = None
        if source is not None:
            self._template = _compile(source, self.name, now or datetime.now())
            self._marks = _reasoning_marks(source)

    def first(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The ids of a prompt that asks for the assistant's next message."""
        if not messages:
            raise ChatError("a chat needs at least one message before the model can answer")
        if self._template is None:
            return tuple(self.tokenizer.encode("".join(m.content for m in messages)))
        self._refuse_assistant_last(messages)
        return tuple(self.tokenizer.encode(self._render(messages, prompt=True)))

    def follow(
        self, before: Sequence[Message], new: Sequence[Message], *, ended_by: int | None
    ) -> tuple[int, ...]:
        """The ids to append after a sampled turn so that the model answers ``new``.

        ``before`` is the chat so far, its last message the sampled one. ``ended_by``
        is the token that ended that turn: if it is the template's end of turn it is not
        written twice. None: the turn was cut (a length limit, a stop string), and the
        template's end of turn is supplied.
        Raises ChatError if the template would change anything before the new messages.
        """
        if not before or before[-1].role != "assistant":
            raise ChatError("the chat so far must end with the assistant's message")
        if not new:
            raise ChatError("nothing new was said to the model")
        if self._template is None:
            return tuple(self.tokenizer.encode("".join(m.content for m in new)))
        self._refuse_assistant_last(new)
        suffix = self._suffix(before, new)
        self._refuse_reasoning_filter(before, new)
        ids = self.tokenizer.encode(suffix)
        return tuple(ids[self._end_of_turn_length(ids, ended_by) :])

    def _suffix(self, before: Sequence[Message], new: Sequence[Message]) -> str:
        """What the template writes after the last assistant message's text."""
        words = _placeholders(before, new)
        said = _with_contents(before, words)
        prompt = self._render(said[:-1], prompt=True)
        whole = self._render([*said, *new], prompt=True)
        if not whole.startswith(prompt):
            self._refuse("writes the earlier messages differently once another one follows", prompt, whole)
        gap, found, suffix = whole[len(prompt) :].partition(words[-1])
        if not found:
            self._refuse("leaves out the assistant's earlier message once another one follows", prompt, whole)
        if gap.strip():
            self._refuse(
                f"writes {gap!r} before an assistant's message, which its generation prompt does not hold",
                prompt,
                whole,
            )
        if any(word in suffix for word in words):
            self._refuse("repeats an assistant's earlier message", prompt, whole)
        return suffix

    def _end_of_turn_length(self, ids: Sequence[int], ended_by: int | None) -> int:
        """How many of ``ids`` (blank ones, then the end of turn) the sampled turn already has."""
        if ended_by is None or ended_by not in ids:
            return 0
        place = ids.index(ended_by)
        return 0 if self.tokenizer.decode(ids[:place]).strip() else place + 1

    def _refuse_reasoning_filter(self, before: Sequence[Message], new: Sequence[Message]) -> None:
        """Probe whether earlier assistant messages lose what stands between reasoning marks."""
        words = _placeholders(before, new)
        for opening, closing in self._marks:
            probe = [f"{opening}\n{word}R\n{closing}\n\n{word}A" for word in words]
            whole = self._render([*_with_contents(before, probe), *new], prompt=True)
            for word in words:
                if f"{word}R" not in whole or f"{word}A" not in whole:
                    self._refuse(
                        f"drops what an earlier answer holds between {opening} and {closing}",
                        "",
                        "",
                    )

    def _refuse(self, how: str, prompt: str, whole: str) -> NoReturn:
        """Raise; with both renderings, the detail shows where they part."""
        pairs = enumerate(zip(prompt, whole, strict=False))
        start = max(0, next((i for i, (a, b) in pairs if a != b), len(prompt)) - 60)
        detail = f"before: ...{prompt[start:]!r}\nafter:  ...{whole[start:]!r}" if whole else ""
        raise ChatError(
            f"{self.name} {how}, so a follow-up turn cannot be appended to the sampled tokens "
            "(trajectories in several segments are not supported yet)",
            expected="a chat template that only appends to what was said before",
            next_command="set chat_template to a file with such a template, or let episodes end after a turn",
            detail=detail,
        )

    def _refuse_assistant_last(self, messages: Sequence[Message]) -> None:
        if messages[-1].role == "assistant":
            raise ChatError(
                "the last message before the model answers is the assistant's own",
                expected="a chat that ends with a user, tool or system message",
            )

    def _render(self, messages: Sequence[Message], *, prompt: bool) -> str:
        assert self._template is not None
        try:
            with boundary(Boundary.CHAT, self.name):
                return self._template.render(
                    messages=[{"role": m.role, "content": m.content} for m in messages],
                    add_generation_prompt=prompt,
                    tools=None,
                    documents=None,
                    **self.tokenizer.special_tokens,
                )
        except ChatError as error:
            if isinstance(error.__cause__, _Refusal):
                roles = ", ".join(m.role for m in messages)
                raise ChatError(
                    f"{self.name} refuses this chat: {error.__cause__}",
                    where=f"messages of the roles {roles}",
                    next_command="change the task's messages, or set chat_template to another file",
                ) from error.__cause__
            error.where = _template_line(error.__cause__) or error.where
            raise


class _Refusal(jinja2.TemplateError):
    """The template itself called raise_exception."""


class _GenerationMarks(Extension):
    """``{% generation %}...{% endgeneration %}``: loss masks for others; ours come from sampling."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's declaration

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _source(tokenizer: ChatTokenizer, template: str | Path) -> tuple[str, str | None]:
    """What errors call the template, and its text (None: raw)."""
    if template == "none":
        return "raw text", None
    if template == "auto":
        if tokenizer.chat_template is None:
            raise ChatError(
                "this model has no chat template",
                where="chat_template.jinja and tokenizer_config.json of the model folder",
                expected="one of: chat_template='none' (prompts are raw text, for base models); "
                "chat_template='FILE.jinja' (a template of your own); a model that comes with a template",
                next_command="palestra train FILE.py --set chat_template=none",
            )
        return "the model's chat template", tokenizer.chat_template
    text = str(template)
    if isinstance(template, str) and ("{{" in text or "{%" in text):
        return "the inline chat template", text
    try:
        return f"the chat template {text}", Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ChatError(
            f"the chat template {text} cannot be read: {error}",
            expected="'auto', 'none', a file with a Jinja template, or the template itself",
        ) from error


def _compile(source: str, name: str, now: datetime) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationMarks, loopcontrols]
    )

    def raise_exception(message: str) -> NoReturn:
        raise _Refusal(message)

    def tojson(value: object, ensure_ascii: bool = False, indent: int | None = None,
               separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:  # fmt: skip
        # Jinja's own filter escapes HTML; templates of chats mean plain JSON.
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = now.strftime
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        lines = source.splitlines()
        line = lines[error.lineno - 1].strip() if 0 < error.lineno <= len(lines) else ""
        raise ChatError(
            f"{name} is not a valid Jinja template: {error.message}",
            where=f"line {error.lineno}: {line[:120]}",
        ) from error


def _template_line(error: BaseException | None) -> str:
    """Which line of the template was being rendered: jinja2 puts it into the traceback."""
    frames = traceback.extract_tb(error.__traceback__ if error is not None else None)
    lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
    return f"line {lines[-1]} of the template" if lines else ""


_CLOSING = re.compile(r"</([A-Za-z][\w-]*)>|\[/([A-Z][A-Z_]*)\]")


def _reasoning_marks(source: str) -> tuple[tuple[str, str], ...]:
    """Pairs of marks whose content a template might filter: the usual one, and those it names itself."""
    marks = {("<think>", "</think>"): None}
    for angle, square in _CLOSING.findall(source):
        marks[(f"<{angle}>", f"</{angle}>") if angle else (f"[{square}]", f"[/{square}]")] = None
    return tuple(marks)


def _placeholders(before: Sequence[Message], new: Sequence[Message]) -> list[str]:
    """One word per assistant message of ``before``, none of which occurs in any message."""
    text = "".join(m.content for m in (*before, *new))
    stem = next(s for n in range(len(text) + 2) if (s := f"palestra{n}x") not in text)
    return [f"{stem}{i}q" for i, _ in enumerate(m for m in before if m.role == "assistant")]


def _with_contents(messages: Sequence[Message], contents: Sequence[str]) -> list[Message]:
    """The messages with the assistant's contents replaced, in order."""
    given = iter(contents)
    return [Message("assistant", next(given)) if m.role == "assistant" else m for m in messages]
