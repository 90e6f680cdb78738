"""The exit codes of ``palestra``: part of its interface, listed once. Imports nothing."""

from __future__ import annotations

OK, FAILED, USAGE, MISSING, STOPPED, INTERRUPTED = 0, 1, 2, 3, 4, 130
EXIT_CODES = """exit codes:
  0  ok
  1  the run failed
  2  wrong usage or configuration
  3  something on this machine is missing
  4  stopped early and resumable: the same command continues
  130  interrupted at once"""
