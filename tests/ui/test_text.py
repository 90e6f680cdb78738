"""Model text on a terminal: harmless, one line, still readable."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.ui.text import safe_text


@pytest.mark.parametrize(
    ("attack", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2J\x1b[H\x1b[?1049hgone", "gone"),
        ("\x1b]0;owned\x07title", "title"),
        ("\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\", "click"),
        ("\x1bP+q544e\x1b\\dcs", "dcs"),
        ("\x9b31mc1", "c1"),
        ("\x1bcreset", "reset"),
        ("\x1b", ""),
        ("\x1b[", ""),
        ("\x1b]unfinished", ""),
        ("over\rwrite\x08\x08", "over write"),
        ("one\ntwo\tthree\u2028four\x85five", "one two three four five"),
        ("abc\u202edcba\u2066x\u2069\u200f", "abcdcbax"),
        ("zero\u200bwidth\ufeff\u00ad", "zerowidth"),
        ("tag\U000e0041\U000e007f", "tag"),
        ("lone\ud800surrogate", "lonesurrogate"),
        ("private\ue000use", "privateuse"),
        ("0 \x1a 0", "0 0"),
        ("bell\x07\x00\x7f", "bell"),
        ("a" + "\u0301" * 50, "a\u0301\u0301"),
        ("[bold]not markup[/bold] :smile:", "[bold]not markup[/bold] :smile:"),
        ("größer 数学 ∑ ok", "größer 数学 ∑ ok"),
    ],
)
def test_what_could_act_is_removed_and_what_can_be_read_stays(attack: str, shown: str) -> None:
    """CVE-2025-62593 and Helicone#5588, CASES 34: model output is only ever text."""
    assert safe_text(attack) == shown


@settings(deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=[])), st.integers(1, 50))
def test_nothing_that_comes_out_can_act(text: str, limit: int) -> None:
    shown = safe_text(text, limit)
    assert len(shown) <= limit
    assert all(unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") for c in shown)
    assert safe_text(shown, limit) == shown


def test_long_text_is_cut_with_an_ellipsis_and_without_reading_it_all() -> None:
    assert safe_text("x" * 10_000_000, 5) == "xxxx…"
    assert safe_text("exact", 5) == "exact"
    assert safe_text("\x1b[31m" * 20 + "text", 10) == "text"
