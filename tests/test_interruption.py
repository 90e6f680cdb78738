"""Real processes, really killed: the same command always arrives where an undisturbed run arrives."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers.job_file import finish, start, write_job
from helpers.tiny import make_tiny_model
from palestra.loop.checkpoints import committed
from palestra.loop.ledger import Audit, Ledger
from palestra.models.tensors import load_tensors
from palestra.records.reader import RunReader

PER_STEP = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    code, output = finish(write_job(folder, model, name="run"))
    assert code == 0, output
    return folder / "runs" / "run"


def audit(run: Path) -> Audit:
    return Ledger(PER_STEP).replay(RunReader(run).ledger()).audit()


def assert_equal_runs(run: Path, reference: Path) -> None:
    """Same losses, same final weights, and a ledger that proves itself."""
    proof = audit(run)
    assert proof.ok, proof
    assert proof.steps == audit(reference).steps
    assert RunReader(run).series("train/loss") == RunReader(reference).series("train/loss")
    last, other = (load_tensors(committed(r / "checkpoints")[-1].folder) for r in (run, reference))
    assert all(torch.equal(last[name], tensor) for name, tensor in other.items())


def drawn_steps(run: Path, attempt: int) -> list[int]:
    """The steps whose draws this attempt recorded."""
    if not (run / "ledger").is_dir():
        return []
    return [e["step"] for e in RunReader(run).ledger() if e["kind"] == "draws" and e["attempt"] == attempt]


def wait_for_step(run: Path, step: int, child: subprocess.Popen[str], attempt: int = 1) -> None:
    """Until this attempt's ledger holds the draws of ``step`` or of a later one."""
    deadline = time.monotonic() + 90
    while not any(drawn >= step for drawn in drawn_steps(run, attempt)):
        assert child.poll() is None, child.communicate()[0]
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.01)


def kill_and_resume(folder: Path, model: Path, kills: int, seed: int) -> Path:
    """SIGKILL the whole process group at random moments after its start-up, then let it finish."""
    job, run, rng = write_job(folder, model, delay=0.05), folder / "runs" / "run", random.Random(seed)
    for attempt in range(1, kills + 1):
        child = start(job)
        wait_for_step(run, 1, child, attempt)
        time.sleep(rng.uniform(0.0, 0.15))
        assert child.poll() is None, "killed before it could finish"
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        assert RunReader(run).state()[0] in ("lost", "finished"), "the dead run is not called running"
    code, output = finish(job)
    assert code == 0, output
    return run


def test_killed_at_random_moments_a_run_ends_as_if_undisturbed(
    tmp_path: Path, model: Path, undisturbed: Path
) -> None:
    """NeMo-RL PR#3599, PR#3480, TRL PR#7294 (case 28): resume skipped about 30 % of the prompts."""
    run = kill_and_resume(tmp_path, model, kills=3, seed=1)
    assert_equal_runs(run, undisturbed)
    assert audit(run).attempts == 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_again_and_again_nothing_is_skipped_or_repeated(
    tmp_path: Path, model: Path, undisturbed: Path, seed: int
) -> None:
    """NeMo-RL PR#3599 (case 28), over twenty kills in all."""
    assert_equal_runs(kill_and_resume(tmp_path, model, kills=5, seed=seed), undisturbed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_interrupt_finishes_the_step_and_the_same_command_continues(
    tmp_path: Path, model: Path, undisturbed: Path, number: signal.Signals
) -> None:
    job, run = write_job(tmp_path, model, delay=0.05), tmp_path / "runs" / "run"
    child = start(job)
    wait_for_step(run, 3, child)
    child.send_signal(number)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 4, output
    assert "the same command continues" in output
    assert RunReader(run).state()[0] == "stopped"
    assert committed(run / "checkpoints")[-1].step >= 3
    code, output = finish(job)
    assert code == 0, output
    assert_equal_runs(run, undisturbed)
    assert audit(run).undone_steps == 0, "a clean stop loses no work"


def test_two_interrupts_stop_at_once_and_lose_nothing(tmp_path: Path, model: Path, undisturbed: Path) -> None:
    job, run = write_job(tmp_path, model, delay=1.5), tmp_path / "runs" / "run"
    child = start(job)
    wait_for_step(run, 1, child)
    child.send_signal(signal.SIGINT)
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    output, _ = child.communicate(timeout=20)
    assert child.returncode == 130, output
    assert "interrupted at once" in output
    assert RunReader(run).state()[0] == "stopped"
    quick = write_job(tmp_path, model, delay=0.0)
    code, output = finish(quick)
    assert code == 0, output
    assert_equal_runs(run, undisturbed)


BLOCKS = """
import time
import palestra as pa

async def reward(task, reply, ep):
    time.sleep(3600)

job = pa.Job(
    model={model!r}, environment=pa.SingleTurn([pa.Task(prompt="hello")], reward), name="run",
    runs_dir={runs!r}, steps=1, prompts_per_step=1, threads=1, algorithm=pa.GRPO(group_size=2),
    sampling=pa.Sampling(max_new_tokens=3),
)
"""


def test_two_interrupts_end_a_run_whose_own_code_blocks_the_event_loop(tmp_path: Path, model: Path) -> None:
    """prime-rl#1713 (case 21): a blocked event loop must not take the keyboard with it."""
    job, run = tmp_path / "blocks.py", tmp_path / "runs" / "run"
    job.write_text(BLOCKS.format(model=str(model), runs=str(tmp_path / "runs")))
    child = start(job)
    wait_for_step(run, 1, child)
    time.sleep(1.5)
    for _ in range(2):
        child.send_signal(signal.SIGINT)
        time.sleep(0.3)
    output, _ = child.communicate(timeout=20)
    assert child.returncode == 130, output
    assert RunReader(run).state()[0] == "stopped"


def test_a_killed_run_leaves_no_process_behind(tmp_path: Path, model: Path) -> None:
    job, run = write_job(tmp_path, model, delay=5.0), tmp_path / "runs" / "run"
    child = start(job)
    wait_for_step(run, 1, child)
    time.sleep(0.5)
    members = descendants(child.pid)
    assert members, "the reward workers are there"
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    deadline = time.monotonic() + 15
    while left := [pid for pid in members if alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def descendants(root: int) -> list[int]:
    """Every process below ``root``, itself left out."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return sorted(found - {root})


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB, mounted for one test."""
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if os.geteuid() != 0 or mount is None or umount is None:
        pytest.skip("only root can mount a small disk")
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run([mount, "-t", "tmpfs", "-o", "size=2m", "none", place], check=False).returncode != 0:
        pytest.skip("this machine does not let root mount a tmpfs")
    yield place
    subprocess.run([umount, "-l", place], check=True)


def test_a_full_disk_stops_the_run_with_advice_and_room_lets_it_continue(
    small_disk: Path, model: Path, undisturbed: Path
) -> None:
    job, run = write_job(small_disk, model), small_disk / "runs" / "run"
    child = start(job)
    wait_for_step(run, 3, child)
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space left"), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 1, output
    assert "No space left on device" in output
    assert "free some space and run the same command" in output
    ballast.unlink()
    code, output = finish(job)
    assert code == 0, output
    assert_equal_runs(run, undisturbed)


def test_a_disk_too_small_for_one_checkpoint_is_refused_before_the_first_step(
    small_disk: Path, model: Path
) -> None:
    (small_disk / "ballast").write_bytes(b"\0" * 1_800_000)
    code, output = finish(write_job(small_disk, model))
    assert code == 1, output
    assert "a checkpoint of this model takes about" in output
    assert not RunReader(small_disk / "runs" / "run").series("train/loss")
