"""``python -m palestra``: the same as the ``palestra`` command."""

from __future__ import annotations

import sys

from palestra.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
