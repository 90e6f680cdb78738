"""The character model that the expressions example makes, without the minute that teaching it takes."""

from __future__ import annotations

import json
from pathlib import Path

from palestra.models.folder import fingerprint
from palestra.models.scratch import make_character_model
from palestra.recipes.expressions import ALPHABET, RECORD, WarmUp


def warmed_up_stand_in(cache: Path) -> Path:
    """Put a random model where `prepare_model` looks for the one it made, and return its folder."""
    folder = cache / "models" / f"expressions-{WarmUp().key}"
    make_character_model(
        folder, alphabet=ALPHABET, layers=1, hidden=16, intermediate=16, heads=2, max_positions=32
    )
    (folder / RECORD).write_text(json.dumps({"files": fingerprint(folder)}))
    return folder
