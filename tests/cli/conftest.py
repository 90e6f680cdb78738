"""Property tests here are about what is said, never about how fast: this machine may be busy."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
