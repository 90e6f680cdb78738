"""The filter is run here by a small BPF machine for both architectures, and for real in a sandbox."""

from __future__ import annotations

import errno
import json
import platform
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.sandbox_modes import Mode
from palestra.errors import IsolationUnavailable
from palestra.sandboxes import seccomp
from palestra.sandboxes.seccomp import ALLOW, CHECKED, DENIED, KILL_PROCESS, MACHINES, filter_program, refuse

EPERM, ENOSYS = refuse(errno.EPERM), refuse(errno.ENOSYS)
NO_FAMILY = refuse(errno.EAFNOSUPPORT)
COLUMNS = {"x86_64": 0, "aarch64": 1}


def run_filter(machine: str, number: int, arguments: tuple[int, ...] = (), arch: int | None = None) -> int:
    """What the kernel would do: a classic-BPF interpreter for the instructions the filter uses."""
    rows = list(struct.iter_unpack("<HBBI", filter_program(machine)))
    words = [*arguments, *(0,) * (6 - len(arguments))]
    data = struct.pack("<iIQ6Q", number, MACHINES[machine].audit_arch if arch is None else arch, 0, *words)
    at, accumulator = 0, 0
    while True:
        code, yes, no, value = rows[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x54:
            accumulator &= value
        elif code == 0x06:
            return value
        else:
            test = {0x15: accumulator == value, 0x35: accumulator >= value, 0x25: accumulator > value}[code]
            at += yes if test else no


def number_of(machine: str, call: str) -> int:
    table = CHECKED if call in CHECKED else DENIED
    number = table[call][COLUMNS[machine]]
    assert number is not None
    return number


@pytest.mark.parametrize("machine", MACHINES)
def test_every_denied_call_is_refused(machine: str) -> None:
    for call, numbers in DENIED.items():
        if numbers[COLUMNS[machine]] is not None:
            assert run_filter(machine, number_of(machine, call)) == EPERM, call


@pytest.mark.parametrize("machine", MACHINES)
def test_only_unix_and_internet_sockets_can_be_made(machine: str) -> None:
    """sandboxes.md, attack 14: a network namespace does not contain AF_VSOCK."""
    for family in range(64):
        expected = ALLOW if family in (1, 2, 10) else NO_FAMILY
        assert run_filter(machine, number_of(machine, "socket"), (family,)) == expected
    assert run_filter(machine, number_of(machine, "socketpair"), (1,)) == ALLOW
    assert run_filter(machine, number_of(machine, "socketpair"), (2,)) == NO_FAMILY


@pytest.mark.parametrize("machine", MACHINES)
def test_the_upper_half_of_an_argument_does_not_hide_a_family(machine: str) -> None:
    assert run_filter(machine, number_of(machine, "socket"), (40 | 1 << 32,)) == NO_FAMILY


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    "flag", [0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000]
)
def test_no_new_namespace_can_be_cloned(machine: str, flag: int) -> None:
    clone = number_of(machine, "clone")
    assert run_filter(machine, clone, (flag | 17,)) == EPERM
    assert run_filter(machine, clone, (0x003D0F00,)) == ALLOW, "a thread is no namespace"
    assert run_filter(machine, number_of(machine, "clone3")) == ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_a_terminal_cannot_be_written_for_another(machine: str) -> None:
    ioctl = number_of(machine, "ioctl")
    assert run_filter(machine, ioctl, (0, 0x5412)) == EPERM
    assert run_filter(machine, ioctl, (0, 0x5412 | 1 << 40)) == EPERM
    assert run_filter(machine, ioctl, (0, 0x5401)) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_personality_can_be_asked_and_not_changed(machine: str) -> None:
    personality = number_of(machine, "personality")
    assert run_filter(machine, personality, (0xFFFFFFFF,)) == ALLOW
    assert run_filter(machine, personality, (0x0040000,)) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_of_another_architecture_kill(machine: str) -> None:
    for arch in (0x40000003, 0xC000003E, 0xC00000B7, 0):
        if arch != MACHINES[machine].audit_arch:
            assert run_filter(machine, 1, arch=arch) == KILL_PROCESS


def test_x32_calls_are_unknown() -> None:
    assert run_filter("x86_64", 0x40000000 | 59) == ENOSYS


@given(st.sampled_from(sorted(MACHINES)), st.integers(0, 2**31 - 1))
def test_every_number_is_allowed_refused_or_unknown(machine: str, number: int) -> None:
    column = COLUMNS[machine]
    named = {numbers[column] for numbers in [*DENIED.values(), *CHECKED.values()]}
    verdict = run_filter(machine, number)
    if number > seccomp.NEWEST_CALL:
        assert verdict == ENOSYS
    elif number not in named:
        assert verdict == ALLOW


def test_an_architecture_without_a_table_is_refused() -> None:
    with pytest.raises(IsolationUnavailable, match="riscv64"):
        filter_program("riscv64")


HEADERS = {
    0: (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), r"#define __NR_(\w+) (\d+)"),
    1: (Path("/usr/include/asm-generic/unistd.h"), r"#define __NR(?:3264)?_(\w+)\s+(\d+)"),
}


@pytest.mark.parametrize("column", HEADERS)
def test_the_tables_agree_with_the_kernel_headers(column: int) -> None:
    path, pattern = HEADERS[column]
    if not path.exists():
        pytest.skip(f"{path} is not installed")
    truth = {name: int(number) for name, number in re.findall(pattern, path.read_text())}
    for name, numbers in [*DENIED.items(), *CHECKED.items()]:
        if name in truth or numbers[column] is None:
            assert numbers[column] == truth.get(name), name


TRY_CALLS = r"""
import ctypes, errno, json, sys
libc = ctypes.CDLL(None, use_errno=True)
answers = {}
for name, (number, arguments) in json.load(sys.stdin).items():
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in arguments])
    answers[name] = [result, errno.errorcode.get(ctypes.get_errno(), "")]
print(json.dumps(answers))
"""


async def try_calls(mode: Mode, calls: dict[str, tuple[int, list[int]]]) -> dict[str, tuple[int, str]]:
    result = await mode.python(TRY_CALLS, stdin=json.dumps(calls).encode())
    assert result.ok, result.stderr
    return {name: (value, code) for name, (value, code) in json.loads(result.stdout).items()}


async def test_denied_calls_fail_for_real_in_a_sandbox(mode: Mode) -> None:
    """Attacks 9, 18, 19 and 23 of the list. Arguments are zeros: harmless where a call did get through."""
    machine = platform.machine()
    calls = {
        name: (number_of(machine, name), [0] * 6)
        for name, numbers in DENIED.items()
        if numbers[COLUMNS[machine]] is not None
    }
    for name, (value, code) in (await try_calls(mode, calls)).items():
        assert (value, code) == (-1, "EPERM"), name


async def test_calls_denied_by_argument_fail_for_real_in_a_sandbox(mode: Mode) -> None:
    machine = platform.machine()
    calls: dict[str, tuple[int, list[int]]] = {
        f"socket {family}": (number_of(machine, "socket"), [family, 3 if family == 16 else 1, 0])
        for family in (16, 17, 21, 29, 30, 31, 38, 40, 44)
    }
    calls["clone NEWUSER"] = (number_of(machine, "clone"), [0x10000011, 0, 0, 0, 0])
    calls["clone3"] = (435, [0, 0])
    calls["TIOCSTI"] = (number_of(machine, "ioctl"), [0, 0x5412, 0])
    calls["personality"] = (number_of(machine, "personality"), [0x0040000])
    calls["newer than the table"] = (seccomp.NEWEST_CALL + 1, [0] * 6)
    answers = await try_calls(mode, calls)
    for name, (value, code) in answers.items():
        expected = {"clone NEWUSER": "EPERM", "TIOCSTI": "EPERM", "personality": "EPERM"}.get(name)
        assert value == -1
        assert code == (expected or ("EAFNOSUPPORT" if name.startswith("socket") else "ENOSYS")), name


async def test_x32_and_32_bit_calls_do_not_slip_past(mode: Mode) -> None:
    """Attack 24: on x86-64 the same kernel answers two further call tables."""
    if platform.machine() != "x86_64":
        pytest.skip("x32 exists on x86-64 only")
    answers = await try_calls(mode, {"x32 getpid": (0x40000000 | 39, [])})
    assert answers["x32 getpid"] == (-1, "ENOSYS")
    int80 = await mode.python(
        "import ctypes, mmap\n"
        "page = mmap.mmap(-1, 4096, prot=7)\n"
        "page.write(bytes.fromhex('b814000000cd80c3'))\n"  # mov eax, 20 (getpid); int 0x80; ret
        "address = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
        "print('alive', ctypes.CFUNCTYPE(ctypes.c_int)(address)())\n"
    )
    assert (int80.signal, int80.stdout) == (31, b""), "SIGSYS"


async def test_threads_processes_and_files_still_work_under_the_filter(mode: Mode) -> None:
    result = await mode.python(
        "import subprocess, threading, tempfile, socket, os, time\n"
        "t = threading.Thread(target=time.sleep, args=(0.01,)); t.start(); t.join()\n"
        "print(subprocess.run(['/bin/echo', 'child'], capture_output=True).stdout)\n"
        "with tempfile.TemporaryFile() as file: file.write(b'x')\n"
        "a, b = socket.socketpair(); a.send(b'hi'); print(b.recv(2))\n",
        processes=4,
    )
    assert (result.exit_code, result.stdout) == (0, b"b'child\\n'\nb'hi'\n"), result.stderr
