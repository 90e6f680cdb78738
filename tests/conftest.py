"""What holds for every test: hypothesis judges behaviour, never speed, and one thread computes."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("palestra", deadline=None, print_blob=True)
settings.load_profile("palestra")
