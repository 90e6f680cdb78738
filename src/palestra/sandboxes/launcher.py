"""A small process that starts sandboxes, buries them, and imports nothing of palestra.

It exists for four reasons. Forking from it is cheap, while forking a trainer of
several GiB costs 50 ms per GiB. It may lower its children's user id and limits
between fork and exec, where a process with threads may not. As subreaper it
inherits a sandbox's init when bubblewrap exits, so "done" is said only after the
kernel has removed every process of the sandbox, and CPU seconds are complete.
And when palestra dies, however it dies, the control socket closes and everything
it started is killed. It is single-threaded, holds no data of the run, and
never lets a child return into its loop.

Run as ``python -I -S -B launcher.py PARENT CONTROL_FD FILTER_FD BWRAP LIBRARY|- PREFIX|-``.
Protocol, on a SOCK_SEQPACKET pair: in, ``R`` + id with fds (request, stdin, stdout,
stderr, source?), ``K`` + id; out, JSON ``{"id", "event": "up"|"done", ...}``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys
from typing import NoReturn

STATUS_FD, FILTER_FD, LIBRARY_FD, SOURCE_FD = 3, 4, 5, 6
"""Where a child finds its descriptors; bubblewrap closes each before the program starts."""
HIGH_FD = 32
INSIDE_ID = 65534
"""The user and group id a program sees."""
DROPPED_ID_BASE, DROPPED_IDS_EACH = 0x70000000, 32
"""Ids that belong to nobody (above systemd's container ranges): one per slot of one launcher."""

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 0x1000, 0x4000, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    except OSError as error:
        raise OSError(error.errno, f"writing {path}: {os.strerror(error.errno or 0)}") from error
    finally:
        os.close(fd)


def mapped_id(candidate: int, mapping: str) -> int | None:
    """``candidate`` if ``mapping`` (the text of a uid_map) holds it, else nobody's id, else None."""
    ranges = [(int(row.split()[0]), int(row.split()[2])) for row in mapping.splitlines() if row.strip()]
    for value in (candidate, INSIDE_ID):
        if any(start <= value < start + count for start, count in ranges):
            return value
    return None


def unprivileged_id(slot: int) -> int | None:
    """The user id that slot's sandboxes get when this process is root; None where it stays as it is.

    With a single mapped id that is not the host's root there is nothing to drop to,
    and nothing to drop. Raises OSError where the host's root could not be left.
    """
    if os.geteuid() != 0:
        return None
    with open("/proc/self/uid_map") as file:
        mapping = file.read()
    chosen = mapped_id(
        DROPPED_ID_BASE + os.getpid() % 2**22 * DROPPED_IDS_EACH + slot % DROPPED_IDS_EACH, mapping
    )
    if chosen is None and mapping.split()[1] == "0":
        raise OSError("no user id is mapped here beside root's own, so root cannot be left")
    return chosen


class Run:
    """One sandbox: bubblewrap's monitor (our child) and its init (ours once the monitor is gone)."""

    def __init__(self, key: int, monitor: int, status_fd: int) -> None:
        self.key = key
        self.monitor = monitor
        self.status_fd = status_fd
        self.status = b""
        self.init: int | None = None
        self.exit_code: int | None = None
        self.error = ""
        self.wait_status: int | None = None
        self.init_gone = False
        self.kill = False
        self.closed = False
        self.cpu_s = 0.0

    def read_status(self) -> bool:
        """Take what bubblewrap reported; true when the init's id became known by it."""
        known = self.init is not None
        while True:
            try:
                block = os.read(self.status_fd, 4096)
            except BlockingIOError:
                break
            if not block:
                self.closed = True
                break
            self.status += block
        for line in self.status.split(b"\n")[:-1]:
            report = json.loads(line)
            self.init = report.get("child-pid", self.init)
            self.exit_code = report.get("exit-code", self.exit_code)
            self.error = report.get("error", self.error)
        return not known and self.init is not None


class Launcher:
    def __init__(self, control: socket.socket, filter_fd: int, bwrap: str, library: str, prefix: str) -> None:
        self.control = control
        self.filter_fd = filter_fd
        self.bwrap_fd = os.open(bwrap, os.O_RDONLY | os.O_CLOEXEC)
        self.library_fd = os.open(library, os.O_RDONLY | os.O_CLOEXEC) if library != "-" else None
        self.prefix = prefix if prefix != "-" else None
        self.runs: dict[int, Run] = {}
        self.orphans: dict[int, resource.struct_rusage] = {}
        self.pid = os.getpid()
        self.poll = select.poll()
        self.wakeup_r, wakeup_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)

    def serve(self) -> None:
        """Until palestra is gone; then nothing that was started is left."""
        self.poll.register(self.control, select.POLLIN)
        self.poll.register(self.wakeup_r, select.POLLIN)
        # A fork of palestra may hold the socket's other end open after palestra was killed.
        parent = os.pidfd_open(os.getppid())
        self.poll.register(parent, select.POLLIN)
        serving = True
        while serving or self.runs:
            for fd, _event in self.poll.poll():
                if fd in (self.control.fileno(), parent):
                    if fd == parent or not self._take():
                        serving = False
                        self.poll.unregister(fd)
                        for run in self.runs.values():
                            run.kill = True
                            self._kill(run)
                elif fd == self.wakeup_r:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wakeup_r, 4096)
                else:
                    self._hear(fd)
            self._reap()

    def _take(self) -> bool:
        data, fds, flags, _address = socket.recv_fds(self.control, 64, 8)
        if not data:
            return False
        key = int(data[1:])
        if data[:1] == b"K":
            run = self.runs.get(key)
            if run is not None:
                run.kill = True
                self._kill(run)
            return True
        try:
            if flags & socket.MSG_CTRUNC:
                raise OSError("too few file descriptors are free")
            self._start(key, fds)
        except OSError as error:
            self._done(key, 0, None, f"the launcher could not start a process: {error}")
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _start(self, key: int, fds: list[int]) -> None:
        with open(fds[0], "rb", closefd=False) as file:
            request = json.loads(file.read())
        status_r, status_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            pid = os.fork()
            if pid == 0:
                self._become(request, fds[1:], status_w)
        except OSError:
            os.close(status_r)
            raise
        finally:
            os.close(status_w)
        self.runs[key] = Run(key, pid, status_r)
        self.poll.register(status_r, select.POLLIN)

    def _hear(self, status_fd: int) -> None:
        run = next((run for run in self.runs.values() if run.status_fd == status_fd), None)
        if run is None:
            return
        if run.read_status():
            self._say({"id": run.key, "event": "up"})
            if run.kill:
                self._kill(run)
        if run.closed:
            self.poll.unregister(status_fd)

    def _kill(self, run: Run) -> None:
        """Kill as soon as it is safe: before its init is known, a dead monitor would lose it."""
        if run.wait_status is None:
            if run.init is not None:
                os.kill(run.monitor, signal.SIGKILL)
        elif run.init is not None and not run.init_gone:
            # Only we can reap it now, so the id is still its own.
            with contextlib.suppress(ProcessLookupError):
                os.kill(run.init, signal.SIGKILL)

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            run = next((run for run in self.runs.values() if run.monitor == pid), None)
            if run is None:
                self.orphans[pid] = usage
            else:
                run.read_status()
                run.wait_status = status
                run.cpu_s += usage.ru_utime + usage.ru_stime
        for run in [run for run in self.runs.values() if run.wait_status is not None]:
            self._bury(run)
        if not self.runs:
            self.orphans.clear()

    def _bury(self, run: Run) -> None:
        if run.init is not None and not run.init_gone:
            usage = self.orphans.pop(run.init, None)
            if usage is not None:
                run.cpu_s += usage.ru_utime + usage.ru_stime
                run.init_gone = True
            elif not _is_child(run.init):
                run.init_gone = True  # the monitor reaped it: its usage is in the monitor's
            else:
                self._kill(run)
                return
        self.runs.pop(run.key)
        with contextlib.suppress(KeyError):  # it was closed and unregistered already
            self.poll.unregister(run.status_fd)
        os.close(run.status_fd)
        self._done(run.key, run.wait_status or 0, run, run.error)

    def _done(self, key: int, wait_status: int, run: Run | None, error: str) -> None:
        self._say(
            {
                "id": key,
                "event": "done",
                "wait_status": wait_status,
                "exit_code": run.exit_code if run is not None else None,
                "up": run is not None and run.init is not None,
                "error": error,
                "cpu_s": run.cpu_s if run is not None else 0.0,
            }
        )

    def _say(self, message: dict[str, object]) -> None:
        # Palestra gone: the socket's end is about to say so, too.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.control.send(json.dumps(message).encode())

    # -- in the child ---------------------------------------------------------------------------

    def _become(self, request: dict, fds: list[int], status_fd: int) -> NoReturn:
        """Turn this forked child into bubblewrap, or report why not and die."""
        report_fd = status_fd
        try:
            self._place_descriptors(fds, status_fd)
            report_fd = STATUS_FD
            scratch = f"size={request['scratch_bytes']},nr_inodes={request['scratch_inodes']},mode=1777"
            if os.geteuid() == 0:
                # Mounts first: only root can reach an interpreter in a folder closed to others.
                _unshare(CLONE_NEWNS)
                _mount(scratch, self.prefix)
                _leave_root(request["slot"])
                _enter_user_namespace(CLONE_NEWUSER)
            else:
                _enter_user_namespace(CLONE_NEWUSER | CLONE_NEWNS)
                _mount(scratch, self.prefix)
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == self.pid:
                _limit(request["limits"])
                preload = {"LD_PRELOAD": f"/proc/self/fd/{LIBRARY_FD}"} if self.library_fd is not None else {}
                os.execve(f"/proc/self/fd/{self.bwrap_fd_high}", ["bwrap", *request["argv"]], preload)
        except (OSError, ValueError) as error:
            os.write(report_fd, json.dumps({"error": str(error)}).encode() + b"\n")
        finally:
            os._exit(70)

    def _place_descriptors(self, fds: list[int], status_fd: int) -> None:
        def high(fd: int) -> int:
            return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH_FD)

        filter_fd = os.open(f"/proc/self/fd/{self.filter_fd}", os.O_RDONLY)  # an offset of its own
        wanted = {0: fds[0], 1: fds[1], 2: fds[2], STATUS_FD: status_fd, FILTER_FD: filter_fd}
        if self.library_fd is not None:
            wanted[LIBRARY_FD] = self.library_fd
        if len(fds) > 3:
            wanted[SOURCE_FD] = fds[3]
        self.bwrap_fd_high = high(self.bwrap_fd)
        moved = {target: high(fd) for target, fd in wanted.items()}
        # Nothing below fails for want of a free descriptor.
        os.closerange(3, HIGH_FD)
        for target, fd in moved.items():
            os.dup2(fd, target, inheritable=True)
        os.set_blocking(STATUS_FD, True)


def _is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _leave_root(slot: int) -> None:
    chosen = unprivileged_id(slot)
    if chosen is not None:
        os.setgroups([])
        os.setresgid(chosen, chosen, chosen)
        os.setresuid(chosen, chosen, chosen)
        _prctl(PR_SET_DUMPABLE, 1)  # or /proc/self/uid_map would still belong to root


def _unshare(flags: int) -> None:
    _check(_libc.unshare(flags), f"creating namespaces {flags:#x}")


def _enter_user_namespace(flags: int) -> None:
    """A user namespace of the sandbox's own: there the kernel counts its processes alone."""
    uid, gid = os.geteuid(), os.getegid()
    _unshare(flags)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{INSIDE_ID} {uid} 1\n")
    _write("/proc/self/gid_map", f"{INSIDE_ID} {gid} 1\n")


def _mount(scratch: str, prefix: str | None) -> None:
    """In a mount namespace of this child's own: the private /tmp, and a way to the interpreter.

    bubblewrap cannot bound how many files a tmpfs holds, nor bind what lies behind a
    folder closed to its user: that folder is hidden by an empty one with only ``prefix`` in it.
    """

    def mount(source: str, target: str, kind: str | None, flags: int, options: str | None) -> None:
        texts = [text.encode() if text is not None else None for text in (source, target, kind, options)]
        result = _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
        _check(result, f"mounting {target}")

    mount("none", "/", None, MS_REC | MS_PRIVATE, None)
    if prefix is not None:
        source = os.open(prefix, os.O_PATH)
        mount("hidden", "/" + prefix.split("/")[1], "tmpfs", MS_NOSUID | MS_NODEV, "size=64k,mode=755")
        os.makedirs(prefix)
        mount(f"/proc/self/fd/{source}", prefix, None, MS_BIND | MS_REC, None)
        os.close(source)
    mount("scratch", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, scratch)


def _limit(limits: dict[str, tuple[int, int]]) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and that would outlive exec
    for name, (soft, hard) in limits.items():
        which = getattr(resource, f"RLIMIT_{name}")
        ceiling = resource.getrlimit(which)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(which, (soft, hard))


def main() -> None:
    parent, control_fd, filter_fd, bwrap, library, prefix = sys.argv[1:]
    os.chdir("/")
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    control = socket.socket(fileno=int(control_fd))
    for fd in (int(control_fd), int(filter_fd)):
        os.set_inheritable(fd, False)
    launcher = Launcher(control, int(filter_fd), bwrap, library, prefix)
    if os.getppid() == int(parent):
        launcher.serve()


if __name__ == "__main__":
    main()
