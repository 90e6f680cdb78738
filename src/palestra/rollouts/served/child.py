"""An engine's server as a child of this process, in a process group of its own.

Nothing of it outlives this process: a shell at the head of the group holds the other
end of a pipe. When the pipe closes it removes the server's files and kills the whole
group; the group goes too when the server ends, or does not end on request. What the
server prints goes to one file, and whoever asks why it is gone is shown that file's
errors and its end.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from palestra.rollouts.base import EngineDead
from palestra.rollouts.served.leftovers import ROOMS

GRACE_S = 10
"""How long a server that was asked to end may take."""
_GUARD = f"""
home=$1; shift
exec 3<&0 </dev/null
"$@" 3<&- & server=$!
{{
    if read -r word <&3; then
        if [ "$word" = end ]; then kill -TERM $server; sleep {GRACE_S}; fi
    else
        while read -r room; do rm -rf -- "$room"; done <"$home/{ROOMS}"
        rm -rf -- "$home"
    fi
    kill -KILL 0
}} &
wait $server
echo "the server ended with exit status $?" >&2
kill -KILL 0
"""
"""``end`` on standard input asks the server to end; the end of the input ends everything, files too."""
_ERROR = re.compile(r"\b[A-Z]\w*(?:Error|Exception)\b: .*")
_SHOWN_ERRORS, _SHOWN_LINES = 6, 12


class ChildServer:
    """A running server. Made by ``launch``."""

    def __init__(self, process: asyncio.subprocess.Process, leash: int, log: Path) -> None:
        self._process = process
        self._leash: int | None = leash
        self.log = log

    @classmethod
    async def launch(cls, command: Sequence[str], environment: Mapping[str, str], home: Path) -> ChildServer:
        """Start ``command`` with ``environment`` on top of this process's own.

        ``home`` is the server's folder, with its log; it goes when this process does, and so do
        the folders it lists (`leftovers.note_room`).
        """
        held, leash = os.pipe()
        log = home / "engine.log"
        try:
            with open(log, "ab") as output:  # noqa: ASYNC230 - a local file, opened once
                process = await asyncio.create_subprocess_exec(
                    "sh", "-c", _GUARD, "sh", str(home), *command,
                    stdin=held, stdout=output, stderr=output,
                    env={**os.environ, **environment}, start_new_session=True,
                )  # fmt: skip
        except BaseException:
            os.close(leash)
            raise
        finally:
            os.close(held)
        return cls(process, leash, log)

    @property
    def group(self) -> int:
        """The process group of the server and everything it started."""
        return self._process.pid

    async def ended(self) -> None:
        """Return when the server is gone, and its whole group with it."""
        await self._process.wait()
        self._kill()  # only if the shell was killed before the group

    async def stop(self, *, at_once: bool = False) -> None:
        """End the server, if need be by force; returns when it is gone."""
        if self._leash is not None:
            with suppress(BrokenPipeError):
                os.write(self._leash, b"now\n" if at_once else b"end\n")
        if at_once:
            self._kill()  # the guard does it too, unless it hangs itself
        try:
            async with asyncio.timeout(2 * GRACE_S):
                await self.ended()
        except TimeoutError:
            self._kill()
            await self.ended()
        if self._leash is not None:
            os.close(self._leash)
            self._leash = None

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def epitaph(self, what: str, next_command: str = "") -> EngineDead:
        """The error that says ``what`` and shows what the server printed about it (case 9)."""
        return EngineDead(
            what,
            where=str(self.log),
            next_command=next_command or "read the server's log, then start another engine",
            detail=tail(self.log),
        )


def tail(log: Path) -> str:
    """What went wrong in a log and how it ends; what cannot be read is said instead.

    A server that fails goes on talking while it ends, so the errors it named come first.
    """
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"(its log cannot be read: {error})"
    errors = dict.fromkeys(found[0] for line in lines if (found := _ERROR.search(line)))
    return "\n".join([*list(errors)[:_SHOWN_ERRORS], *lines[-_SHOWN_LINES:]])
