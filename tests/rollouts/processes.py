"""What the tests of servers ask the machine about their processes."""

from __future__ import annotations

import asyncio
from pathlib import Path


def members(group: int) -> list[int]:
    """The processes of a group that are not dead already."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(entry.name))
    return found


async def gone(group: int) -> bool:
    """Whether a group's last process dies within a few seconds: killed ones take a moment."""
    for _ in range(500):
        if not members(group):
            return True
        await asyncio.sleep(0.02)
    return False


def server_of(group: int) -> int:
    """The process of a group that runs a server."""
    return next(pid for pid in members(group) if b"fake_served" in Path(f"/proc/{pid}/cmdline").read_bytes())
