from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from helpers.sandbox_modes import Mode, here_or_skip, unprivileged_or_skip
from palestra.sandboxes.bubblewrap import BubblewrapHost


@pytest.fixture(scope="session", params=["here", "unprivileged"])
def mode(request: pytest.FixtureRequest) -> Iterator[Mode]:
    """Every test that uses it runs with this process's user and without privileges."""
    if request.param == "here":
        runner = here_or_skip()
        yield runner
        asyncio.run(runner.host.close())
    else:
        with unprivileged_or_skip() as unprivileged:
            yield unprivileged


@pytest.fixture(scope="session")
def isolation() -> None:
    asyncio.run(here_or_skip().host.close())


@pytest.fixture
async def host(isolation: None) -> AsyncIterator[BubblewrapHost]:
    """A host of two slots in this test's event loop."""
    made = BubblewrapHost(concurrency=2)
    made._probed = True
    yield made
    await made.close()
