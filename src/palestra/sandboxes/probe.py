"""The questions a machine must answer before model-written code may run on it.

The probe runs a program inside a real sandbox that tries what must not work: see
a marker file of the host, reach a listener on the host's loopback, open AF_VSOCK,
write to the system, exceed memory, processes, file size, files. The program only
reports; the verdict is made outside. One answer that is missing or wrong means
IsolationUnavailable, naming each wall that did not hold.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from palestra.errors import IsolationUnavailable
from palestra.sandboxes.base import ExecResult, SandboxSpec

PROBE_SPEC = SandboxSpec(memory_mb=128, scratch_mb=1, time_s=20.0, processes=3, output_kb=64)

PROBE_SOURCE = r"""
import errno, json, os, socket, sys, threading, time
question = json.load(sys.stdin)
report = {"uid": os.getuid(), "environment": sorted(os.environ)}
report["seen"] = {name: os.listdir(name) for name in question["private"] if os.path.exists(name)}

def attempt(action):
    try:
        return {"worked": True, "value": action()}
    except MemoryError:
        return {"worked": False, "error": "MemoryError"}
    except OSError as error:
        return {"worked": False, "error": errno.errorcode.get(error.errno, str(error.errno))}
    except RuntimeError as error:
        return {"worked": False, "error": str(error)}

def write(path):
    with open(path, "w") as file:
        file.write("x")

def connect(port):
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
        client.settimeout(2)
        client.connect(("127.0.0.1", port))

def route_out():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect(("192.0.2.1", 9))

def fill(path, limit):
    with open(path, "wb", buffering=0) as file:
        for _ in range(limit):
            file.write(bytes(1 << 20))

def many_files(limit):
    for number in range(limit):
        open(f"/tmp/{number}", "x").close()

def processes(limit):
    children = 0
    try:
        for _ in range(limit):
            if os.fork() == 0:
                time.sleep(30)
                os._exit(0)
            children += 1
    except OSError as error:
        return {"children": children, "error": errno.errorcode[error.errno]}
    return {"children": children, "error": ""}

report["marker"] = attempt(lambda: os.stat(question["marker"]).st_size)
report["loopback"] = attempt(lambda: connect(question["port"]))
report["route"] = attempt(route_out)
report["interfaces"] = attempt(lambda: [name for _, name in socket.if_nameindex()])
report["vsock"] = attempt(lambda: socket.socket(40, socket.SOCK_STREAM).close())
report["memfd"] = attempt(lambda: os.close(os.memfd_create("x")))
report["system"] = attempt(lambda: write("/usr/palestra-probe"))
report["top"] = attempt(lambda: write("/palestra-probe"))
report["scratch"] = attempt(lambda: write("/tmp/probe"))
report["file"] = attempt(lambda: fill("/tmp/fill", 4))
report["memory"] = attempt(lambda: len(bytearray(question["memory_mb"] << 20)))
report["processes"] = attempt(lambda: processes(64))
os.path.exists("/tmp/fill") and os.unlink("/tmp/fill")
report["files"] = attempt(lambda: many_files(100000))
print(json.dumps(report))
"""


class Canary:
    """A marker file and a loopback listener on the host, for as long as the probe runs."""

    def __enter__(self) -> Self:
        fd, name = tempfile.mkstemp(prefix="palestra-canary-")
        os.close(fd)
        self.marker = Path(name)
        self.marker.chmod(0o644)
        self.listener = socket.create_server(("127.0.0.1", 0))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.listener.close()
        self.marker.unlink(missing_ok=True)

    def question(self) -> bytes:
        return json.dumps(
            {
                "marker": str(self.marker),
                "port": self.listener.getsockname()[1],
                "memory_mb": PROBE_SPEC.memory_mb,
                "private": PRIVATE,
            }
        ).encode()


PRIVATE = ("/proc", "/sys", "/home", "/root", "/var", "/run", "/mnt", "/srv")
"""Folders of the host of which a sandbox may see nothing, but the way to its interpreter."""

MUST_FAIL = {
    "marker": "a file of the host was visible",
    "loopback": "the host's loopback was reachable",
    "route": "there was a route to the network",
    "vsock": "an AF_VSOCK socket could be opened",
    "memfd": "memory outside the limits could be had by memfd_create",
    "system": "/usr was writable",
    "top": "/ was writable",
    "file": "the size of /tmp was not bounded",
    "files": "the number of files in /tmp was not bounded",
    "memory": "the memory limit did not bite",
}


def judge(result: ExecResult, prefix: Path | None) -> None:
    """Raise IsolationUnavailable unless the probe's program reported that every wall held.

    ``prefix`` is the interpreter's folder where it lies outside the system's.
    """
    try:
        report = json.loads(result.stdout)
    except ValueError:
        raise remedy_text(
            f"the probe ended with {result.status} {result.exit_code}", result.stderr.decode(errors="replace")
        ) from None
    wrong = [text for name, text in MUST_FAIL.items() if report[name]["worked"]]
    if not report["scratch"]["worked"]:
        wrong.append("/tmp was not writable")
    if report["uid"] != 65534:
        wrong.append(f"the program ran as uid {report['uid']}")
    if report["interfaces"].get("value", ["lo"]) != ["lo"]:
        wrong.append(f"it saw the network interfaces {report['interfaces']}")
    counted = report["processes"].get("value", {})
    if counted.get("children") != PROBE_SPEC.processes - 1 or counted.get("error") != "EAGAIN":
        wrong.append(f"the process limit {PROBE_SPEC.processes} did not hold: {counted}")
    way = {f"/{prefix.parts[1]}": [prefix.parts[2]]} if prefix is not None else {}
    for folder, names in report["seen"].items():
        if names != way.get(folder):
            wrong.append(f"the sandbox held {folder}: {', '.join(names[:5])}")
    if wrong:
        raise IsolationUnavailable(
            "this machine cannot isolate programs: " + "; ".join(wrong),
            expected="every limit to hold in a test sandbox",
            next_command="palestra doctor",
        )


def remedy(error: Exception) -> IsolationUnavailable:
    """The probe's own failure, with the setting that most likely causes it."""
    return remedy_text(str(getattr(error, "what", error)), str(getattr(error, "detail", "")))


_SWITCHES = (
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1",
     "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
    ("/proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
)  # fmt: skip


def remedy_text(what: str, detail: str) -> IsolationUnavailable:
    command = next((command for path, off, command in _SWITCHES if _reads(path, off)), "")
    return IsolationUnavailable(
        f"no sandbox could be started here: {what}",
        expected="user namespaces for unprivileged users; in a container, a seccomp profile that allows them",
        next_command=command or "palestra doctor",
        detail=detail,
    )


def _reads(path: str, text: str) -> bool:
    try:
        return Path(path).read_text().strip() == text
    except OSError:
        return False
