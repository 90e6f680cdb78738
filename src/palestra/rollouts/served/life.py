"""The life of one engine's server: it comes up, it beats, and its death is told to all who wait.

A server that ends is noticed at once, one that no longer answers after ``silent_s``, and
one whose engine is dead when it says so; the last two are then ended. Whoever fails
because of it gets one and the same EngineDead, with the last lines that the server
printed (case 9); a failure that the server survives stays the request's own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from palestra.rollouts.base import EngineDead
from palestra.rollouts.served.child import ChildServer
from palestra.rollouts.served.http import Broken, Gone, HttpClient, Refused

HEARTBEAT_S = 5.0
"""How often the server is asked whether it lives."""
_DEATH_S = 5.0
"""How long a failed request waits to learn whether the server died of it."""


class ServerLife:
    """One server and the connections to it, from launch to death."""

    def __init__(
        self,
        kind: str,
        server: ChildServer,
        client: HttpClient,
        beats: Callable[[float], Awaitable[None]],
        on_death: Callable[[], None],
        silent_s: float,
    ) -> None:
        """``beats(timeout_s)`` returns if the server answers and raises Broken or Refused if not.

        Gone, where the server answers that its engine is dead.
        """
        self.client = client
        self._kind = kind
        self._server = server
        self._beats = beats
        self._on_death = on_death
        self._silent_s = silent_s
        self._dead: EngineDead | None = None
        self._death = asyncio.Event()
        self._came_up = False
        self._watcher = asyncio.create_task(self._watch())

    @property
    def dead(self) -> EngineDead | None:
        """Why the server is gone, as an error to raise; None while it lives."""
        dead = self._dead
        if dead is None:
            return None
        return EngineDead(dead.what, where=dead.where, next_command=dead.next_command, detail=dead.detail)

    async def come_up(self, startup_s: float) -> None:
        """Return once the server answers; EngineDead if it ends before, or takes too long."""
        try:
            async with asyncio.timeout(startup_s):
                while not self._death.is_set():
                    try:
                        await self._beats(HEARTBEAT_S)
                        self._came_up = True
                        return
                    except Gone as error:
                        await self._bury(self._server.epitaph(error.what))
                    except (Broken, Refused):
                        await asyncio.sleep(0.2)
        except TimeoutError:
            what = f"the {self._kind} server did not answer within {startup_s:g} s of its start"
            await self._bury(self._server.epitaph(what, "raise startup_s, or read the server's log"))
        assert self.dead is not None
        raise self.dead

    async def cause(self, error: Broken | Refused) -> Exception:
        """What really happened when ``error`` did: the server's death, or just that."""
        if isinstance(error, Gone):
            await self._bury(self._server.epitaph(error.what))
        if isinstance(error, Refused) and error.status < 500:
            return error
        with suppress(TimeoutError):
            async with asyncio.timeout(_DEATH_S):
                await self._death.wait()
        return self.dead or error

    async def condemn(self, what: str, error: BaseException) -> Exception:
        """End a server that must not go on, because of ``error``; the error to raise."""
        if isinstance(error, Broken | Refused):
            await self.cause(error)
        await self._bury(self._server.epitaph(f"{what}: {error}", "start another engine"))
        assert self.dead is not None
        return self.dead

    async def stop(self) -> None:
        """End the server; requests under way raise Broken, and who waits for it to come up EngineDead."""
        self._watcher.cancel()
        self._dead = self._dead or EngineDead("the engine was closed")
        self._death.set()
        await self.client.close()
        await self._server.stop()

    async def _watch(self) -> None:
        heard = time.monotonic()
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._server.ended()
                what = f"the {self._kind} server ended"
                break
            except TimeoutError:
                pass
            try:
                await self._beats(HEARTBEAT_S)
                heard = time.monotonic()
            except Gone as error:
                what = error.what
                break
            except (Broken, Refused):
                if self._came_up and time.monotonic() - heard > self._silent_s:
                    what = f"the {self._kind} server has not answered for {self._silent_s:g} s"
                    break
        await self._bury(self._server.epitaph(what))

    async def _bury(self, dead: EngineDead) -> None:
        self._dead = self._dead or dead
        await self._server.stop(at_once=True)
        self._death.set()
        self._on_death()
        await self.client.close()
