"""Text of a model, a task or a program, made safe for a terminal.

Nothing that comes out of `safe_text` can move the cursor, change a colour, set a
title, reorder the line (bidirectional controls) or break it: escape sequences are
removed whole, every other control, format, surrogate and private character too, and
white space becomes single spaces. Pure, standard library only.
"""

from __future__ import annotations

import re
import unicodedata

# CSI, then OSC/DCS/SOS/PM/APC with their payload up to BEL or ST (or the end), then two-byte escapes.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?",
    re.DOTALL,
)
_SPACES = re.compile(r"\s+")
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn"})
_STACK = 2
"""Combining marks kept on one character: more is not writing but an attack on the line's height."""


def safe_text(text: str, limit: int = 200) -> str:
    """``text`` as one harmless line of at most ``limit`` characters, cut with an ellipsis."""
    # Long input is cut before the work, with room for what is removed.
    stripped = _SPACES.sub(" ", _ESCAPES.sub("", text[: 20 * limit + 1000]))
    kept: list[str] = []
    marks = 0
    for char in stripped:
        category = unicodedata.category(char)
        if category in _HIDDEN:
            continue
        marks = marks + 1 if category in ("Mn", "Me") else 0
        if marks <= _STACK:
            kept.append(char)
    line = _SPACES.sub(" ", "".join(kept)).strip()  # again: what was hidden may have parted spaces
    return line if len(line) <= limit else line[: max(0, limit - 1)] + "…"
