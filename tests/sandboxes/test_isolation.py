"""What a hostile program finds in a sandbox: nothing of the host. Numbers are rows of the attack list."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from pathlib import Path

import pytest

from helpers.sandbox_modes import Mode

ERRNO = r"""
import errno, json, os, sys
def attempt(action, *arguments):
    try:
        return ["worked", repr(action(*arguments))]
    except OSError as error:
        return [errno.errorcode.get(error.errno, str(error.errno)), ""]
"""


async def ask(mode: Mode, code: str, **spec: int) -> dict[str, list[str]]:
    result = await mode.python(ERRNO + code + "\nprint(json.dumps(answers))", **spec)
    assert result.ok, result.stderr
    return json.loads(result.stdout)


async def test_the_program_is_nobody_without_capabilities(mode: Mode) -> None:
    answers = await ask(
        mode,
        r"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
libc.syscall(125 if os.uname().machine == "x86_64" else 90, header, data)
answers = {
    "ids": list(os.getresuid() + os.getresgid()) + os.getgroups(),
    "capabilities": list(data),
    "no new privileges": libc.prctl(39, 0, 0, 0, 0),
    "setuid": attempt(os.setuid, 0),
    "chown": attempt(os.chown, "/tmp", 0, 0),
}
""",
    )
    assert set(answers["ids"]) == {65534}
    assert set(answers["capabilities"]) == {0}
    assert answers["no new privileges"] == 1
    assert answers["setuid"][0] == "EINVAL", "no other id is mapped"
    assert answers["chown"][0] in ("EINVAL", "EPERM")


async def test_the_host_sees_no_root_process(mode: Mode) -> None:
    """The user of a sandbox on the host is never root, and a root palestra uses an id of nobody's."""
    marker = f"{os.getpid()}.25"
    import asyncio

    running = asyncio.create_task(mode.exec(["/bin/sleep", marker], time_s=1.0))
    owners: set[int] = set()
    while not running.done() and not owners:
        await asyncio.sleep(0.02)
        owners = {uid for uid, line in processes() if line == f"/bin/sleep {marker}"}
    await running
    assert len(owners) == 1
    (owner,) = owners
    assert owner != 0
    if mode.name == "here" and os.geteuid() == 0:
        assert owner >= 0x70000000


def processes() -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode()
            found.append((folder.stat().st_uid, line))
        except OSError:
            continue
    return found


async def test_only_the_system_is_there_and_all_of_it_is_read_only(mode: Mode) -> None:
    """Attacks 10, 11, 17 and 20: no /proc, no /sys, no home, five devices."""
    answers = await ask(
        mode,
        r"""
answers = {"root": sorted(os.listdir("/")), "dev": sorted(os.listdir("/dev")), "etc": os.listdir("/etc")}
for name in ("/x", "/usr/x", "/etc/x", "/dev/x", "/main.py", "/usr/bin/python3"):
    answers[name] = attempt(open, name, "a")
answers["mknod"] = attempt(os.mknod, "/tmp/disk", 0o60666, os.makedev(8, 0))
answers["unlink"] = attempt(os.unlink, "/main.py")
answers["up"] = sorted(os.listdir("/../../.."))
""",
    )
    allowed = {"bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "main.py", "sbin", "tmp", "usr"}
    assert set(answers["root"]) <= allowed
    assert answers["up"] == answers["root"]
    assert answers["dev"] == ["full", "null", "random", "urandom", "zero"]
    assert answers["etc"] in ([], ["ld.so.cache"])
    for name in ("/x", "/usr/x", "/etc/x", "/dev/x", "/main.py", "/usr/bin/python3", "unlink"):
        assert answers[name][0] in ("EROFS", "EACCES"), name
    assert answers["mknod"][0] == "EPERM"


@pytest.mark.parametrize("folder", [tempfile.gettempdir(), "/var/tmp", "/dev/shm", str(Path.cwd())])
async def test_a_file_of_the_host_is_not_visible(mode: Mode, folder: str) -> None:
    if not os.access(folder, os.W_OK):
        pytest.skip(f"{folder} is not writable here")
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".palestra-canary-") as marker:
        Path(marker.name).chmod(0o666)
        answers = await ask(mode, f"answers = {{'seen': attempt(open, {marker.name!r})}}")
    assert answers["seen"][0] == "ENOENT"


async def test_the_environment_is_the_sandboxes_own(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack 12."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    answers = await ask(mode, "answers = dict(os.environ)")
    assert set(answers) <= {"PATH", "LANG", "HOME", "TMPDIR", "PWD"}


async def test_only_three_descriptors_are_open(mode: Mode) -> None:
    """Attacks 16 and 33: no control socket, status pipe, filter or library reaches a program."""
    answers = await ask(
        mode, "answers = {'open': [n for n in range(4096) if attempt(os.fstat, n)[0] == 'worked']}"
    )
    assert answers["open"] == [0, 1, 2]


async def test_the_network_ends_at_the_sandbox(mode: Mode) -> None:
    """Attack 13: neither the host's loopback, nor the metadata service, nor a name."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        answers = await ask(
            mode,
            rf"""
import socket
def connect(address, family=socket.AF_INET):
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(1)
        client.connect(address)
answers = {{
    "loopback": attempt(connect, ("127.0.0.1", {port})),
    "metadata": attempt(connect, ("169.254.169.254", 80)),
    "outside": attempt(connect, ("192.0.2.1", 80)),
    "v6": attempt(connect, ("2001:db8::1", 80), socket.AF_INET6),
    "name": attempt(socket.getaddrinfo, "example.org", 80),
}}
""",
        )
    assert answers["loopback"][0] == "ECONNREFUSED"
    for name in ("metadata", "outside", "v6"):
        assert answers[name][0] == "ENETUNREACH", name
    assert answers["name"][0] != "worked"


async def test_abstract_sockets_of_the_host_are_out_of_reach(mode: Mode) -> None:
    """Attack 15."""
    name = f"\0palestra-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        answers = await ask(
            mode,
            rf"""
import socket
client = socket.socket(socket.AF_UNIX)
answers = {{"abstract": attempt(client.connect, {name!r})}}
""",
        )
    assert answers["abstract"][0] == "ECONNREFUSED"


async def test_processes_of_the_host_cannot_be_signalled(mode: Mode) -> None:
    """Attack 8: kill(-1) and kill(1) reach nobody outside, and the init survives."""
    answers = await ask(
        mode,
        f"""
answers = {{
    "host": attempt(os.kill, {os.getpid()}, 0),
    "init": attempt(os.kill, 1, 9),
    "pids": [n for n in range(1, 200) if attempt(os.kill, n, 0)[0] != "ESRCH"],
}}
""",
    )
    assert answers["host"][0] == "ESRCH"
    assert answers["pids"] == [1, 2]


async def test_a_sandbox_starts_empty_whatever_the_last_one_wrote(mode: Mode) -> None:
    await mode.python("open('/tmp/left', 'w').write('x')")
    assert (await mode.python("import os; print(os.listdir('/tmp'))")).stdout == b"[]\n"


async def test_ipc_uts_and_session_are_private(mode: Mode) -> None:
    """Attack 26: no controlling terminal; the host's name does not enter."""
    answers = await ask(
        mode,
        r"""
answers = {
    "host": os.uname().nodename,
    "tty": attempt(os.open, "/dev/tty", os.O_RDWR),
}
""",
    )
    assert answers["host"] == "sandbox"
    assert answers["tty"][0] in ("ENOENT", "ENXIO")


async def test_setuid_programs_give_nothing(mode: Mode) -> None:
    """Attack 21."""
    result = await mode.exec(["/bin/sh", "-c", "su -c id root < /dev/null"], processes=4)
    assert not result.ok
    assert b"uid=0" not in result.stdout
