"""What one sandboxed program costs, beside a bare process and a bare bubblewrap in the same run.

Run `python benchmarks/sandbox.py [--rounds N]`. Wall times are per program, the
ways taken in turn within a round, so that other load falls on all of them alike.
CPU is the sum of every process involved (ours, the launcher's, bubblewrap's, the
program's), in blocks, in turn: this process adopts orphans, because bubblewrap
leaves its init to whoever stands above. Nothing here is asserted; compare ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

from palestra.sandboxes.base import SandboxSpec
from palestra.sandboxes.bubblewrap import NAMESPACES, BubblewrapHost

PR_SET_CHILD_SUBREAPER = 36
SNIPPET = "print(sum(range(10)))"
Way = Callable[[], Awaitable[None]]


def own_cpu_s() -> float:
    """CPU seconds of this process and every child that was reaped."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                break
        except ChildProcessError:
            break
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def process_cpu_s(pid: int) -> float:
    """CPU seconds of a living process and the children it reaped."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def spawner(argv: list[str]) -> Way:
    async def way() -> None:
        subprocess.run(argv, stdout=subprocess.DEVNULL, check=True, env={})  # noqa: ASYNC221 - measured alone

    return way


async def measure(rounds: int) -> dict[str, dict[str, float]]:
    host = BubblewrapHost()
    host.probe()
    bwrap, python, system = host.parts()
    bare = [
        str(bwrap.binary),
        *NAMESPACES,
        *system,
        "--tmpfs",
        "/tmp",
        "--setenv",
        "PATH",
        "/usr/bin:/bin",
        "--",
    ]
    snippet = [python.executable, "-I", "-S", "-B", "-c", SNIPPET]
    async with host.open(SandboxSpec()) as box:

        async def box_true() -> None:
            assert (await box.exec(["true"])).ok

        async def box_python() -> None:
            assert (await box.python(SNIPPET)).ok

        ways: dict[str, Way] = {
            "process true": spawner(["/bin/true"]),
            "bwrap true": spawner([*bare, "true"]),
            "sandbox true": box_true,
            "process python": spawner(snippet),
            "bwrap python": spawner([*bare, *snippet]),
            "sandbox python": box_python,
        }
        await box_true()
        walls: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                started = time.perf_counter()
                await way()
                walls[name].append(time.perf_counter() - started)
        launcher = host.launcher().pid
        cpu: dict[str, float] = dict.fromkeys(ways, 0.0)
        for _ in range(4):
            for name, way in ways.items():
                before = own_cpu_s() + process_cpu_s(launcher)
                for _ in range(rounds // 4):
                    await way()
                await asyncio.sleep(0.1)
                cpu[name] += own_cpu_s() + process_cpu_s(launcher) - before
    await host.close()
    return {
        name: {
            "p50_ms": 1e3 * statistics.median(times),
            "p99_ms": 1e3 * sorted(times)[min(len(times) - 1, int(0.99 * len(times)))],
            "cpu_ms": 1e3 * cpu[name] / (4 * (rounds // 4)),
        }
        for name, times in walls.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    rows = asyncio.run(measure(max(4, arguments.rounds)))
    if arguments.json:
        print(json.dumps(rows))
        return
    print(f"uid {os.geteuid()}, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}")
    print(f"{'':16} {'p50 ms':>8} {'p99 ms':>8} {'CPU ms':>8}")
    for name, row in rows.items():
        print(f"{name:16} {row['p50_ms']:8.1f} {row['p99_ms']:8.1f} {row['cpu_ms']:8.1f}")


if __name__ == "__main__":
    main()
