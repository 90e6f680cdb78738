"""The system-call filter of a sandbox, as classic BPF built here, without a library.

The filter is the second wall: namespaces and dropped privileges come first, and
every call denied here is one that no program of ours needs and that has led out
of sandboxes, reaches the hypervisor (AF_VSOCK is not contained by a network
namespace), or holds memory that no resource limit counts. It checks the
architecture before anything else, refuses x32, and answers ENOSYS to calls
newer than the tables, so that a newer kernel does not widen it. A machine whose
architecture has no table here is refused, never filtered less.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from palestra.errors import IsolationUnavailable

NEWEST_CALL = 450
"""The last call both tables know (set_mempolicy_home_node); higher numbers answer ENOSYS."""

X32_BIT = 0x40000000
ALLOWED_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6: inside an empty network namespace they reach nobody."""
ALLOWED_PERSONALITIES = (0, 0xFFFFFFFF)
"""PER_LINUX, and the query."""
NAMESPACE_FLAGS = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
DENIED_IOCTLS = (0x5412, 0x541C, 0x5423)
"""TIOCSTI, TIOCLINUX and TIOCSETD: they inject into, or change, a terminal."""

# name: (x86-64 number, aarch64 number or None where it does not exist)
DENIED: Mapping[str, tuple[int, int | None]] = MappingProxyType(
    {
        # other processes
        "ptrace": (101, 117),
        "process_vm_readv": (310, 270),
        "process_vm_writev": (311, 271),
        "process_madvise": (440, 440),
        "kcmp": (312, 272),
        "pidfd_getfd": (438, 438),
        # kernel interfaces with a long record of escapes
        "bpf": (321, 280),
        "perf_event_open": (298, 241),
        "userfaultfd": (323, 282),
        "io_uring_setup": (425, 425),
        "io_uring_enter": (426, 426),
        "io_uring_register": (427, 427),
        "add_key": (248, 217),
        "request_key": (249, 218),
        "keyctl": (250, 219),
        "fanotify_init": (300, 262),
        "fanotify_mark": (301, 263),
        "vmsplice": (278, 75),
        "modify_ldt": (154, None),
        # the file-system tree
        "mount": (165, 40),
        "umount2": (166, 39),
        "pivot_root": (155, 41),
        "chroot": (161, 51),
        "open_tree": (428, 428),
        "move_mount": (429, 429),
        "fsopen": (430, 430),
        "fsconfig": (431, 431),
        "fsmount": (432, 432),
        "fspick": (433, 433),
        "mount_setattr": (442, 442),
        "open_by_handle_at": (304, 265),
        "name_to_handle_at": (303, 264),
        "quotactl": (179, 60),
        "quotactl_fd": (443, 443),
        "swapon": (167, 224),
        "swapoff": (168, 225),
        # namespaces
        "unshare": (272, 97),
        "setns": (308, 268),
        # the machine
        "kexec_load": (246, 104),
        "kexec_file_load": (320, 294),
        "create_module": (174, None),
        "init_module": (175, 105),
        "finit_module": (313, 273),
        "delete_module": (176, 106),
        "get_kernel_syms": (177, None),
        "query_module": (178, None),
        "syslog": (103, 116),
        "reboot": (169, 142),
        "acct": (163, 89),
        "settimeofday": (164, 170),
        "clock_settime": (227, 112),
        "clock_adjtime": (305, 266),
        "adjtimex": (159, 171),
        "sethostname": (170, 161),
        "setdomainname": (171, 162),
        "iopl": (172, None),
        "ioperm": (173, None),
        "lookup_dcookie": (212, 18),
        "nfsservctl": (180, 42),
        "uselib": (134, None),
        "ustat": (136, None),
        "sysfs": (139, None),
        "_sysctl": (156, None),
        "vhangup": (153, 58),
        # memory that RLIMIT_AS does not see once it is unmapped
        "memfd_create": (319, 279),
        "memfd_secret": (447, 447),
        "shmget": (29, 194),
        "shmat": (30, 196),
        "shmctl": (31, 195),
        "shmdt": (67, 197),
        "msgget": (68, 186),
        "msgsnd": (69, 189),
        "msgrcv": (70, 188),
        "msgctl": (71, 187),
        "semget": (64, 190),
        "semop": (65, 193),
        "semtimedop": (220, 192),
        "semctl": (66, 191),
        "mq_open": (240, 180),
        "mq_unlink": (241, 181),
        "mbind": (237, 235),
        "set_mempolicy": (238, 237),
        "set_mempolicy_home_node": (450, 450),
        "migrate_pages": (256, 238),
        "move_pages": (279, 239),
    }
)

# name: (x86-64, aarch64). These are decided by an argument.
CHECKED: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "socket": (41, 198),
        "socketpair": (53, 199),
        "clone": (56, 220),
        "clone3": (435, 435),
        "ioctl": (16, 29),
        "personality": (135, 92),
    }
)

ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000


def refuse(code: int) -> int:
    """The filter's return value that makes a call fail with ``code``."""
    return 0x00050000 | code


_LOAD, _JEQ, _JGE, _JGT, _AND, _RET = 0x20, 0x15, 0x35, 0x25, 0x54, 0x06
_NUMBER, _ARCH = 0, 4


def _low_word_of_argument(index: int) -> int:
    return 16 + 8 * index  # both architectures are little endian


@dataclass(frozen=True, slots=True)
class _Machine:
    column: int
    audit_arch: int
    x32: bool


MACHINES: Mapping[str, _Machine] = MappingProxyType(
    {"x86_64": _Machine(0, 0xC000003E, True), "aarch64": _Machine(1, 0xC00000B7, False)}
)


class _Program:
    """Instructions whose jumps name labels, resolved once at the end."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, str | int, str | int, int]] = []
        self._labels: dict[str, int] = {}

    def label(self, name: str) -> None:
        self._labels[name] = len(self._rows)

    def load(self, offset: int) -> None:
        self._rows.append((_LOAD, 0, 0, offset))

    def mask(self, value: int) -> None:
        self._rows.append((_AND, 0, 0, value))

    def jump(self, code: int, value: int, *, yes: str | int = 0, no: str | int = 0) -> None:
        self._rows.append((code, yes, no, value))

    def give(self, value: int) -> None:
        self._rows.append((_RET, 0, 0, value))

    def encode(self) -> bytes:
        def distance(target: str | int, row: int) -> int:
            steps = self._labels[target] - row - 1 if isinstance(target, str) else target
            if not 0 <= steps <= 255:
                raise ValueError(f"the filter jumps {steps} instructions; BPF allows 0 to 255")
            return steps

        return b"".join(
            struct.pack("<HBBI", code, distance(yes, row), distance(no, row), value)
            for row, (code, yes, no, value) in enumerate(self._rows)
        )


def filter_program(machine: str | None = None) -> bytes:
    """The filter for ``machine`` (this one by default), as an array of struct sock_filter.

    Raises IsolationUnavailable for an architecture without tables.
    """
    name = machine or platform.machine()
    found = MACHINES.get(name)
    if found is None:
        raise IsolationUnavailable(
            f"there is no system-call filter for the architecture {name!r}",
            expected=" or ".join(MACHINES),
        )
    program = _Program()
    program.load(_ARCH)
    program.jump(_JEQ, found.audit_arch, yes=1)
    program.give(KILL_PROCESS)
    program.load(_NUMBER)
    if found.x32:
        program.jump(_JGE, X32_BIT, yes="enosys")
    program.jump(_JGT, NEWEST_CALL, yes="enosys")
    for call, numbers in CHECKED.items():
        program.jump(_JEQ, numbers[found.column], yes=call)
    for numbers in DENIED.values():
        number = numbers[found.column]
        if number is not None:
            program.jump(_JEQ, number, yes="eperm")
    program.give(ALLOW)
    _argument_checks(program)
    return program.encode()


def _argument_checks(program: _Program) -> None:
    for call, allowed, otherwise in (
        ("socket", ALLOWED_FAMILIES, "no_family"),
        ("socketpair", ALLOWED_FAMILIES[:1], "no_family"),
        ("personality", ALLOWED_PERSONALITIES, "eperm"),
    ):
        program.label(call)
        program.load(_low_word_of_argument(0))
        for value in allowed[:-1]:
            program.jump(_JEQ, value, yes="allow")
        program.jump(_JEQ, allowed[-1], yes="allow", no=otherwise)
    program.label("clone")
    program.load(_low_word_of_argument(0))
    program.mask(NAMESPACE_FLAGS)
    program.jump(_JEQ, 0, yes="allow", no="eperm")
    program.label("ioctl")
    program.load(_low_word_of_argument(1))
    for request in DENIED_IOCTLS:
        program.jump(_JEQ, request, yes="eperm")
    program.label("allow")
    program.give(ALLOW)
    program.label("eperm")
    program.give(refuse(errno.EPERM))
    program.label("no_family")
    program.give(refuse(errno.EAFNOSUPPORT))
    # clone3 keeps its flags behind a pointer, which a filter cannot read: libraries then use clone.
    program.label("clone3")
    program.label("enosys")
    program.give(refuse(errno.ENOSYS))
