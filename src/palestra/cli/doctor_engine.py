"""``palestra doctor --engine vllm``: whether an engine runs here, and computes what the trainer does.

The engine is really started, on a small model with random weights, and a real weight sync
proves it twice: at its first version and after a change of every weight. Its logprobs on
the same tokens are compared with the trainer's; nothing on the machine is changed.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from palestra.cli.command import UsageError
from palestra.cli.doctor import Check
from palestra.errors import EngineError, MissingExtraError, PalestraError, nearest

if TYPE_CHECKING:
    from palestra.weights.sync import SyncReport

ENGINES = ("vllm",)
"""SGLang is not among them: what has never been run cannot be pronounced healthy."""
PROBED_TOKENS = 32
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
STARTUP_S = 600.0


def findings(spec: str) -> list[Check]:
    """What there is to say of ``vllm`` or ``vllm:/path/to/python``; later looks need the earlier."""
    kind, _, path = spec.partition(":")
    if kind not in ENGINES:
        raise UsageError(
            f"doctor: there is no engine {kind!r} to look at",
            expected=", ".join(ENGINES),
            nearest=nearest(kind, ENGINES),
            next_command="palestra doctor --engine vllm:/path/to/python",
        )
    try:
        from palestra.rollouts.served.vllm import default_python, installed
    except MissingExtraError as error:
        return [Check("engine packages", "fail", error.what, error.next_command)]
    python = Path(path) if path else default_python()
    try:
        found = installed(python)
    except EngineError as error:
        where = f" ({error.where})" if error.where else ""
        return [Check("engine environment", "fail", error.what + where, error.next_command)]
    versions = ", ".join(f"{name} {version}" for name, version in found.items())
    environment = Check("engine environment", "ok", f"{versions} at {python}")
    return [environment, parity(python)]


def parity(python: Path) -> Check:
    """Start the engine on a small model, sync it twice, and compare with the trainer."""
    folder = Path(tempfile.mkdtemp(prefix="palestra-doctor-"))
    try:
        reports, tolerance = asyncio.run(_synced(python, folder / "model"))
    except PalestraError as error:
        last = error.detail.strip().splitlines()
        said = f"{error.what}{': ' + last[0] if last else ''}"
        where = f" (its log: {error.where})" if error.where else ""
        return Check(
            "engine parity", "fail", said + where, error.next_command or "palestra doctor --engine vllm"
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    first, second = reports
    return Check(
        "engine parity",
        "ok",
        f"fp32 logprobs of {PROBED_TOKENS} tokens are the trainer's: largest gap "
        f"{first.probe_gap_max:.1e}, and {second.probe_gap_max:.1e} after a sync that changed "
        f"{second.changed_tensors} tensors (allowed {tolerance:g}); a small random Llama, "
        f"swapped in {second.commit_s:.2f} s",
    )


async def _synced(python: Path, folder: Path) -> tuple[tuple[SyncReport, SyncReport], float]:
    from palestra.batches import LossSpec
    from palestra.models.scratch import make_character_model
    from palestra.rollouts.served.vllm import VllmEngine
    from palestra.trainer.settings import TrainerSettings
    from palestra.trainer.torch_trainer import TorchTrainer
    from palestra.types import Version
    from palestra.weights.sync import TOLERANCES, WeightSync, probe_batch

    make_character_model(folder, alphabet=_ALPHABET, layers=2)
    probe = tuple(i * 7 % len(_ALPHABET) for i in range(PROBED_TOKENS + 1))
    trainer = TorchTrainer(folder, TrainerSettings())
    engine = VllmEngine(folder, python=python, dtype="fp32", max_running=4, cache_gb=1, startup_s=STARTUP_S)
    sync = WeightSync(trainer, engine, probe, "fp32")
    try:
        first = await sync.serve(Version("doctor", 0))
        batch = probe_batch(probe)
        batch = replace(batch, weights_N=[1.0] * batch.target_count)  # type: ignore[arg-type]
        trainer.step(batch, LossSpec(kind="nll"), 1e-2)
        second = await sync.serve(Version("doctor", 1))
    finally:
        await engine.close()
        trainer.close()
    return (first, second), TOLERANCES["fp32"][1]
