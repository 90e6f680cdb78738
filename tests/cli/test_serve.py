"""``palestra serve`` and ``palestra chat``: what is found, what is refused, and a real process to its end."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny import make_tiny_model
from helpers.tiny_lora import make_lora
from palestra.cli.main import main
from palestra.cli.serve import COMMANDS, _access
from palestra.cli.served_model import build_renderer, find_served, load_weights
from palestra.errors import ModelSourceError, PalestraError
from palestra.models.tensors import load_tensors
from palestra.models.tokenizer import Tokenizer
from palestra.types import Version


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two whole checkpoints and a torn one."""
    folder = tmp_path / "runs" / "maths"
    for step in (10, 20, 30):
        make_tiny_model(folder / "checkpoints" / str(step), seed=step)
        if step < 30:
            (folder / "checkpoints" / str(step) / "COMMITTED").write_text(f"{step}\n")
    (folder / "run.json").write_text(json.dumps({"schema": 1, "id": "maths", "status": "finished"}))
    config = folder / "config" / "attempt_1"
    config.mkdir(parents=True)
    (config / "resolved.json").write_text(json.dumps({"chat_template": "none"}))
    return folder


@contextmanager
def serving(*words: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address, once it has said it; killed if it has not ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "palestra", "serve", *words, "--threads", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"at (http://\S+)/v1; next: palestra chat", line)
        assert found, line + (process.communicate(timeout=60)[1] if not line else "")
        yield process, found[1]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)


# -- what is served


def test_a_run_is_its_latest_whole_checkpoint_with_its_own_template(run: Path) -> None:
    for spec in ("maths", str(run)):
        served = find_served(spec, run.parent)
        assert served.folder == run / "checkpoints" / "20"
        assert (served.name, served.version, served.chat_template) == ("maths", Version("maths", 20), "none")


def test_a_checkpoint_knows_its_run_and_step(run: Path) -> None:
    served = find_served(str(run / "checkpoints" / "10"), run.parent)
    assert (served.name, served.version) == ("maths", Version("maths", 10))


def test_a_folder_is_a_model_under_its_own_name(model: Path, tmp_path: Path) -> None:
    served = find_served(str(model), tmp_path)
    assert (served.folder, served.name, served.version) == (model, "tiny", Version("tiny", 0))
    odd = make_tiny_model(tmp_path / "my model (2)")
    assert find_served(str(odd), tmp_path).version == Version("my-model-2", 0)


def test_a_run_that_never_saved_says_so(run: Path) -> None:
    for step in (10, 20):
        (run / "checkpoints" / str(step) / "COMMITTED").unlink()
    with pytest.raises(ModelSourceError, match="the run maths has no checkpoint yet"):
        find_served("maths", run.parent)


def test_an_adapter_is_merged_into_the_weights(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    plain = load_tensors(model)
    config, tensors = make_lora(plain, targets=("q_proj",))
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    changed = load_weights(model, tmp_path)
    different = {name for name in plain if not plain[name].equal(changed[name])}
    assert different == {name for name in plain if "q_proj" in name}
    assert all(plain[name].equal(load_weights(model, None)[name]) for name in plain)


def test_a_model_without_a_template_has_no_renderer_unless_one_is_given(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(make_tiny_model(tmp_path, chat_template=False))
    assert build_renderer(tokenizer, "auto") is None
    raw = build_renderer(tokenizer, "none")
    assert raw is not None
    assert raw.render([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], None) == [97, 98]


# -- what is refused


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            ["mahts"],
            2,
            ["there is no run and no model 'mahts'", "nearest: maths", "next: palestra runs list"],
        ),
        (["./nowhere"], 3, ["the model folder ./nowhere does not exist"]),
        (["{model}", "--port", "70000"], 2, ["--port 70000", "0 to 65535"]),
        (["{model}", "--threads", "-3"], 2, ["--threads -3", "0 or more"]),
        (["{model}", "--max-running", "0"], 2, ["--max-running 0", "1 or more"]),
        (["{model}", "--context-tokens", "-1"], 2, ["--context-tokens -1", "0 or more"]),
        (["{model}", "--cache-mb", "-5"], 2, ["--cache-mb -5", "0 or more"]),
        (["{model}", "--adapter", "maths"], 2, ["--adapter NAME=FOLDER"]),
        (["{model}", "--adapter", "tiny=./x"], 2, ["that is the model's own name"]),
        (["{model}", "--adapter", "a=./nowhere", "--port", "0"], 3, ["no adapter_config.json"]),
        (["{model}", "--merge-adapter", "./nowhere", "--port", "0"], 3, ["no adapter_config.json"]),
        (["{model}", "--context-tokens", "99999"], 1, ["context_tokens is 99999"]),
        (["{model}", "--prot", "1"], 2, ["there is no flag --prot", "nearest: --port"]),
        ([], 2, ["MODEL|RUN|CHECKPOINT"]),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_next_step(
    words: list[str],
    code: int,
    said: list[str],
    model: Path,
    run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(run.parent.parent)
    assert main(["serve", *(word.format(model=model) for word in words)]) == code
    shown = capsys.readouterr().err
    assert all(text in shown for text in said), shown
    assert "Traceback" not in shown


def test_a_port_in_use_is_named_before_the_weights_are_read(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(model), "--port", str(port)]) == 1
    shown = capsys.readouterr().err
    assert f"127.0.0.1 port {port} cannot be listened on" in shown
    assert "--port 0" in shown


def test_without_the_extra_the_remedy_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [n for n in sys.modules if n.startswith("palestra.rollouts.server") or n == "aiohttp"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert main(["serve", str(model), "--port", "0"]) == 3
    assert "pip install 'palestra[serve]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("gpu", False)],
)
def test_beyond_loopback_there_is_always_a_token(host: str, local: bool) -> None:
    assert _access(argparse.Namespace(host=host, token="given")) == (local, "given")
    only_local, made = _access(argparse.Namespace(host=host, token=""))
    assert only_local == local
    assert (len(made) >= 32) == (not local)
    assert local or made != _access(argparse.Namespace(host=host, token=""))[1]


# -- a real process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_model_is_served_chatted_with_and_ended_by_a_signal(
    number: signal.Signals, model: Path, tmp_path: Path
) -> None:
    with serving(str(model), "--port", "0") as (process, url):
        with urllib.request.urlopen(f"{url}/health") as response:
            assert json.load(response) == {"status": "ok", "version": "tiny@0"}
        said = subprocess.run(
            [sys.executable, "-m", "palestra", "chat", url, "--max-tokens", "5"],
            input="hi", capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert (said.returncode, said.stderr) == (0, "")
        assert said.stdout.endswith("\n")
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert (out, err) == ("", "")


def test_a_run_is_served_to_holders_of_a_made_up_token_beyond_loopback(run: Path) -> None:
    words = ("maths", "--runs-dir", str(run.parent), "--port", "0", "--host", "0.0.0.0")
    with serving(*words, PALESTRA_TOKEN="") as (process, url):
        assert process.stdout is not None
        token = process.stdout.readline().removeprefix("token (shown once): ").strip()
        assert len(token) >= 32
        local = url.replace("0.0.0.0", "127.0.0.1")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{local}/v1/models")
        assert refused.value.code == 401
        refused.value.close()
        asked = urllib.request.Request(f"{local}/v1/models", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(asked) as response:
            (row,) = json.load(response)["data"]
        assert (row["id"], row["version"]) == ("maths", "maths@20")


def replicas_of(pid: int) -> list[int]:
    """The server processes below ``pid``."""
    found: list[int] = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        python = Path(f"/proc/{child}/exe").resolve().name.startswith("python")
        found += [int(child)] if python and b"--wait-for-weights" in words else []
        found += replicas_of(int(child))
    return found


def test_one_of_several_replicas_may_be_killed_and_is_replaced(model: Path) -> None:
    """A dead replica is found in seconds, its requests go elsewhere, a new one serves once it is proven."""
    with serving(str(model), "--port", "0", "--replicas", "2") as (process, url):
        first = replicas_of(process.pid)
        assert len(first) == 2

        def asked() -> int:
            body = json.dumps({"prompt": [5, 6], "max_tokens": 4, "return_token_ids": True}).encode()
            wanted = urllib.request.Request(
                f"{url}/v1/completions", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(wanted, timeout=60) as response:
                return len(json.load(response)["choices"][0]["token_ids"])

        assert asked() > 0
        os.kill(first[0], signal.SIGKILL)
        assert [asked() > 0 for _ in range(4)] == [True] * 4
        for _ in range(600):
            now = replicas_of(process.pid)
            if len(now) == 2 and first[0] not in now:
                break
            time.sleep(0.1)
        assert first[1] in now
        assert len(now) == 2
        assert asked() > 0
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert not [pid for pid in now if Path(f"/proc/{pid}").exists()], "nothing outlives the server"


# -- chat


class _Scripted(BaseHTTPRequestHandler):
    """Answers every chat with what it was sent, and with one harmful character."""

    asked: list[Any] = []  # noqa: RUF012 - of the class, as the server makes handlers

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "m"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.headers.get("Authorization"), body))
        last = body["messages"][-1]["content"]
        if last == "refuse":
            self._send(400, json.dumps({"error": {"message": "no such thing"}}).encode())
            return
        pieces = [*f"<{last}>\x1b[2J"]
        events: list[Any] = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
        if last == "break":
            events.append({"error": {"message": "killed half-way"}})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]
        self._send(200, "".join(lines).encode())

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        return None


@pytest.fixture
def scripted() -> Iterator[str]:
    _Scripted.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Scripted)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_conversation_goes_on_line_by_line_with_everything_said_before(
    scripted: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", _Terminal("one\n\ntwo\n"))
    assert main(["chat", f"{scripted}/v1/", "--system", "Be kind.", "--token", "t"]) == 0
    shown = capsys.readouterr().out
    assert "<one>" in shown
    assert "<two>" in shown
    assert "\x1b" not in shown
    assert [header for header, _ in _Scripted.asked] == ["Bearer t"] * 2
    messages = _Scripted.asked[1][1]["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    assert messages[2]["content"] == "<one>\x1b[2J"
    assert _Scripted.asked[0][1]["model"] == "m"


def test_a_pipe_is_one_message(
    scripted: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert main(["chat", scripted, "--model", "other"]) == 0
    assert capsys.readouterr().out.startswith("<two\nlines>")
    assert _Scripted.asked[0][1]["model"] == "other"


@pytest.mark.parametrize(
    ("said", "expected"), [("refuse", "the server answered 400: no such thing"), ("break", "killed half-way")]
)
def test_what_the_server_refuses_is_shown(
    said: str,
    expected: str,
    scripted: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    assert main(["chat", scripted]) == 1
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense"])
def test_without_a_server_the_next_command_is_named(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi"))
    assert main(["chat", url]) == 1
    shown = capsys.readouterr().err
    assert "no server answers" in shown
    assert "next: palestra serve MODEL" in shown
    assert isinstance(COMMANDS["serve"].about, str)
    assert issubclass(ModelSourceError, PalestraError)


@pytest.mark.parametrize("verb", ["serve", "chat"])
def test_help_loads_no_server_and_no_tensor_library(verb: str) -> None:
    script = (
        "import sys\nfrom palestra.cli.main import main\n"
        "try:\n    main([sys.argv[1], '--help'])\nexcept SystemExit:\n    pass\n"
        "print('loaded:', *sorted({'aiohttp', 'torch', 'openai', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, verb], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1].strip() == "loaded:"
