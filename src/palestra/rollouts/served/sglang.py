"""SGLang as an engine. Written, not run: its CPU kernels are on no package index, and no GPU was at hand.

Every request and answer here is checked against the schema of SGLang 0.5.23 by tests
with a server that enforces it; whether SGLang then does what it says has not been
seen. It listens on a port of this machine with a key of its own, given to no one else.
Weights are loaded from a file while every request is held in place; prompts are cached
under the version, because held requests forbid flushing the cache.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.errors import EngineError
from palestra.models.dtypes import DtypeName
from palestra.rollouts.base import GenerateRequest, PauseMode, RequestRefused
from palestra.rollouts.served.child import ChildServer
from palestra.rollouts.served.engine import CONTROL_S, LOAD_S, ServedEngine, salt_of
from palestra.rollouts.served.http import HttpClient, Refused
from palestra.rollouts.served.pieces import End, Piece, Sample
from palestra.types import SamplingParams, StopReason, Version

_DTYPES: dict[DtypeName, str] = {"fp32": "float32", "bf16": "bfloat16"}
_MODES = {"keep": "in_place", "drain": "in_place", "abort": "abort"}
_COLDEST = 1e-6
"""SGLang samples greedily below it."""


class SglangEngine(ServedEngine):
    """Implements `Engine`, `Pausable`, `Sleeper` and `AdapterHost` with SGLang 0.5.23. Written, not run."""

    kind = "SGLang"

    def __init__(
        self,
        folder: Path,
        *,
        python: Path,
        dtype: DtypeName,
        max_running: int = 64,
        context_tokens: int = 0,
        startup_s: float = 600.0,
        silent_s: float = 60.0,
        eos_token_ids: Sequence[int] | None = None,
        adapter_rank: int = 0,
        arguments: Sequence[str] = (),
    ) -> None:
        """``arguments`` go to SGLang's server as they are (tensor parallelism, memory, attention backend)."""
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
        self._arguments = tuple(arguments)

    def _refuse(self, request: GenerateRequest) -> None:
        if 0 < request.sampling.temperature < _COLDEST:
            raise RequestRefused(
                f"SGLang samples greedily at temperature {request.sampling.temperature}",
                expected=f"temperature 0, or at least {_COLDEST}",
            )

    async def _launch(self, home: Path, model: Path, version: Version) -> tuple[ChildServer, HttpClient]:
        port, key = _free_port(), secrets.token_hex(32)
        command = [
            str(self._python), "-m", "sglang.launch_server", "--model-path", str(model),
            "--host", "127.0.0.1", "--port", str(port), "--api-key", key,
            "--dtype", _DTYPES[self._dtype], "--context-length", str(self._context),
            "--max-running-requests", str(self._max_running), "--weight-version", str(version),
            "--sampling-defaults", "openai",
            # The default sampler takes no seed; the logprobs of this one are those it sampled from.
            "--sampling-backend", "pytorch", "--incremental-streaming-output",
        ]  # fmt: skip
        if self._adapter_rank:
            command += ["--enable-lora", "--max-lora-rank", str(self._adapter_rank)]
            command += ["--lora-target-modules", "all"]
        environment = {"HF_HUB_OFFLINE": "1"}
        server = await ChildServer.launch([*command, *self._arguments], environment, home)
        return server, HttpClient(port=port, token=key)

    async def _beats(self, timeout_s: float) -> None:
        await self._http.get("/health_generate", timeout_s=timeout_s)

    async def _adopt(self, version: Version) -> None:
        info = await self._http.get("/model_info", timeout_s=CONTROL_S)
        if info.get("weight_version") != str(version):
            raise EngineError(
                f"SGLang says it serves {info.get('weight_version')!r}", expected=f"{version}, as it was told"
            )

    async def _sampled(self, sample: Sample) -> AsyncGenerator[Piece, None]:
        sampling = sample.request.sampling
        cut = sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)
        body: dict[str, Any] = {
            "rid": sample.id,
            "input_ids": list(sample.request.prompt_ids),
            "sampling_params": _sampling(sample, endless=not self._eos),
            "return_logprob": True,
            "stream": True,
            "extra_key": sample.salt,
        }
        if cut:
            body["return_sampling_mask"] = True  # with it come the logprobs after top-k and top-p
        if sample.adapter:
            body["lora_path"] = sample.adapter
        async for event in self._http.events("/generate", body):
            meta = event["meta_info"]
            finish = meta["finish_reason"]
            ids = event["output_ids"]
            if cut:
                logprobs = meta.get("output_token_sampling_logprobs") or []
            else:
                logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or []]
            yield Piece(ids, logprobs, _end(finish, meta) if finish else None)

    async def _abort(self, sample: Sample) -> None:
        await self._http.post("/abort_request", {"rid": sample.id}, timeout_s=CONTROL_S)

    async def _hold(self, mode: PauseMode) -> None:
        if mode == "drain":
            await self._idle.wait()
        await self._http.post("/pause_generation", {"mode": _MODES[mode]}, timeout_s=CONTROL_S)

    async def _go(self) -> None:
        await self._http.post("/continue_generation", {}, timeout_s=CONTROL_S)

    async def _load(self, file: Path, version: Version) -> None:
        body = {
            "model_path": str(file.parent),
            "weight_version": str(version),
            "abort_all_requests": False,
            "flush_cache": False,  # refused while requests are held; the cache is keyed by version
        }
        answer = await self._http.post("/update_weights_from_disk", body, timeout_s=LOAD_S)
        _check_success("/update_weights_from_disk", answer)

    async def _scored(self, tokens: tuple[int, ...], sampling: SamplingParams) -> tuple[float, ...]:
        shaped = (sampling.temperature, sampling.top_p, sampling.top_k) != (1.0, 1.0, 0)
        if shaped and sampling.temperature != 0:
            raise RequestRefused(
                f"SGLang scores prompts at temperature 1 without top-k or top-p only, not at {sampling}",
                expected="SamplingParams()",
            )
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": salt_of(self._version),
        }
        answer = await self._http.post("/generate", body, timeout_s=LOAD_S)
        return tuple(entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:])

    async def _add_adapter(self, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        _check_success(
            "/load_lora_adapter", await self._http.post("/load_lora_adapter", body, timeout_s=LOAD_S)
        )

    async def _remove_adapter(self, name: str) -> None:
        body = {"lora_name": name}
        answer = await self._http.post("/unload_lora_adapter", body, timeout_s=LOAD_S)
        _check_success("/unload_lora_adapter", answer)


def _free_port() -> int:
    """A port that was free a moment ago; if another takes it, the server says so and ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _check_success(path: str, answer: Mapping[str, Any]) -> None:
    if not answer.get("success"):
        raise Refused(400, path, str(answer.get("message") or answer.get("error_message") or answer))


def _sampling(sample: Sample, *, endless: bool) -> dict[str, Any]:
    sampling = sample.request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": sample.most,
        "min_new_tokens": sample.request.min_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "sampling_seed": sampling.seed % 2**31,
        "ignore_eos": endless,  # with it SGLang ignores stop tokens too
        "stop_token_ids": list(sample.stop_token_ids),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sample.request.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sample.request.logit_bias.items()}
    return params


def _end(finish: Mapping[str, Any], meta: Mapping[str, Any]) -> End:
    # SGLang keeps the last positions of a context free: it ends for its length before we would.
    known = {"stop": StopReason.STOP, "abort": StopReason.ABORTED, "length": StopReason.CONTEXT}
    spans = meta.get("weight_versions") or []
    versions = tuple(
        (span["version"], span["start"], span["end"]) for span in spans if span["end"] > span["start"]
    )
    return End(known.get(finish["type"]), versions, meta.get("cached_tokens") or 0)
