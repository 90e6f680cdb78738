from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

Record = dict[str, Any]


class Story:
    """Records of an invented run with its own clock, as a writer would hand them out."""

    def __init__(self) -> None:
        self.m = 1000.0
        self._ids = 0

    def metrics(self, step: int, **values: float) -> Record:
        named = {name.replace("__", "/"): value for name, value in values.items()}
        return {"type": "metrics", "t": self.m, "m": self.m, "step": step, "version": step, "values": named}

    def event(self, kind: str, step: int | None = None, **fields: Any) -> Record:
        return {"type": "event", "t": self.m, "m": self.m, "kind": kind, "step": step, "fields": fields}

    def span(self, name: str, seconds: float) -> Iterator[Record]:
        self._ids += 1
        for phase in ("open", "close"):
            yield {
                "type": "span",
                "t": self.m,
                "m": self.m,
                "phase": phase,
                "id": f"s{self._ids}",
                "name": name,
            }
            self.m += seconds if phase == "open" else 0.0

    def step(self, step: int, reward: float = 0.5, **more: float) -> Iterator[Record]:
        """Seven seconds: four of rollouts (three of them generation), two of training, one of nothing."""
        yield from self.span("generate", 4.0)
        yield from self.span("train", 2.0)
        self.m += 1.0
        yield self.metrics(
            step,
            reward__mean=reward,
            time__step_s=7.0,
            time__generate_s=3.0,
            tokens__sampled=1400.0,
            tokens__useful_fraction=0.91,
            groups__total=8.0,
            groups__zero_variance=3.0,
            train__loss=0.0125,
            **more,
        )

    def whole(self, steps: int = 20, text: str = "boot failed") -> Iterator[Record]:
        yield self.event("state", 0, state="starting", reason=text)
        yield from self.span("eval", 3.0)
        yield self.event(
            "eval", 0, when="before", sampled=[0.1234, 0.08, 0.15, 40], greedy=[0.2, 0.1, 0.3, 20]
        )
        for step in range(1, steps + 1):
            yield self.event("abstain", step, boundary="sandbox", reason=text, count=2)
            yield from self.step(step, reward=step / 40)
        yield self.event("notice", steps, text=text)
        yield self.event("state", steps, state="training", reason=text)
        yield self.event(
            "eval", steps, when="after", sampled=[0.55, 0.5, 0.6, 40], greedy=[0.62, 0.58, 0.68, 20]
        )


@pytest.fixture
def story() -> Callable[[], Story]:
    return Story
