"""``palestra serve``: a model, a run or a checkpoint behind OpenAI's API, on this machine.

The address answers as soon as it is known to be free; ``/health`` says 503 until the
weights are in. On another address than loopback nothing is served without a token.
The first SIGINT or SIGTERM ends it: nothing new is accepted, what runs has a few
seconds, and the exit code is 0.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.cli.codes import OK
from palestra.cli.command import Command, UsageError, safe

if TYPE_CHECKING:
    from aiohttp import web

    from palestra.cli.served_model import Served
    from palestra.rollouts.native.engine import NativeEngine
    from palestra.rollouts.router import Proof, Router


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL|RUN|CHECKPOINT", help="a folder, a model, or a run by name")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="0: one that is free")
    parser.add_argument("--host", default="127.0.0.1", help="another address than loopback needs a token")
    parser.add_argument(
        "--token",
        default=os.environ.get("PALESTRA_TOKEN", ""),
        help="what clients must send (also PALESTRA_TOKEN, which no process list shows)",
    )
    parser.add_argument("--name", default="", help="what clients call the model")
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="serve a LoRA adapter beside the model; may be repeated",
    )
    parser.add_argument(
        "--merge-adapter", type=Path, metavar="FOLDER", help="add a LoRA adapter to the weights"
    )
    parser.add_argument(
        "--chat-template",
        default="",
        metavar="auto|none|FILE",
        help="how chats are written (default: as the run did, else the model's own)",
    )
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="0: every core")
    parser.add_argument(
        "--max-running", type=int, default=64, metavar="N", help="completions computed at once"
    )
    parser.add_argument("--context-tokens", type=int, default=0, metavar="N", help="0: the model's maximum")
    parser.add_argument(
        "--cache-mb", type=int, default=0, metavar="N", help="keys and values; 0: an eighth of free memory"
    )
    parser.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="engines in processes of their own, if more than 1",
    )
    parser.add_argument("--uds", type=Path, metavar="PATH", help="listen on this Unix socket and no port")
    parser.add_argument(
        "--wait-for-weights",
        action="store_true",
        help="serve nothing until weights come over /v1/palestra/stage",
    )
    parser.add_argument("--runs-dir", type=Path, metavar="DIR", help="where runs are kept")


def _serve(args: argparse.Namespace) -> int:
    import asyncio

    from palestra.cli.served_model import find_served

    if not 0 <= args.port < 65536:
        raise UsageError(f"--port {args.port}", expected="0 to 65535")
    if args.replicas < 1 or (args.replicas > 1 and args.wait_for_weights):
        raise UsageError(f"--replicas {args.replicas}", expected="1 or more; 1 with --wait-for-weights")
    least = (("threads", 0), ("max_running", 1), ("context_tokens", 0), ("cache_mb", 0))
    for name, minimum in least:
        if getattr(args, name) < minimum:
            flag = f"--{name.replace('_', '-')} {getattr(args, name)}"
            raise UsageError(flag, expected=f"{minimum} or more")
    return asyncio.run(_run(args, find_served(args.model, args.runs_dir)))


async def _run(args: argparse.Namespace, served: Served) -> int:
    import asyncio
    import signal

    from palestra.cli.served_model import build_engine, build_renderer
    from palestra.models.tokenizer import Tokenizer
    from palestra.rollouts.server.app import build_app

    adapters = [_adapter(given) for given in args.adapter]
    tokenizer = Tokenizer.from_folder(served.folder)
    renderer = build_renderer(tokenizer, args.chat_template or served.chat_template)
    engine = build_engine(served.folder, args)
    local, token = _access(args)
    name = args.name or served.name
    if name in dict(adapters):
        raise UsageError(f"--adapter {name}=...: that is the model's own name", expected="another name")
    # No page reaches a Unix socket, whatever its host is called.
    local_only = local and args.uds is None
    app = build_app(engine, tokenizer, renderer, name, token=token, local_only=local_only)
    runner, port = await _listen(app, args)
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ending.set)
    ended = asyncio.create_task(ending.wait())
    starting = _nothing() if args.wait_for_weights else _start(engine, served, args.merge_adapter, adapters)
    started = asyncio.create_task(starting)
    keeping: asyncio.Task[None] | None = None
    try:
        await asyncio.wait((started, ended), return_when=asyncio.FIRST_COMPLETED)
        if started.done():
            proof = started.result()
            keeping = asyncio.create_task(_keep(engine, served, args, proof))
            if not args.uds:
                what = f"{name} ({served.version})"
                _announce(what, args.host, port, token if token != args.token else "")
            await ended
    finally:
        tasks = [task for task in (started, keeping) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await runner.cleanup()
        await engine.close()
    return OK


async def _nothing() -> None:
    """The weights come over the control plane."""


async def _keep(
    engine: NativeEngine | Router, served: Served, args: argparse.Namespace, proof: Proof | None
) -> None:
    """Replace replicas that die. One with adapters is not replaced: a newcomer would not have them."""
    from palestra.cli.served_model import build_replica, load_weights
    from palestra.rollouts.router import Router, keep_replicas

    if isinstance(engine, Router) and proof is not None and not args.adapter:
        await keep_replicas(
            engine,
            lambda: build_replica(served.folder, args),
            proof,
            lambda: load_weights(served.folder, args.merge_adapter).items(),
        )


async def _start(
    engine: NativeEngine | Router, served: Served, merge: Path | None, adapters: list[tuple[str, Path]]
) -> Proof | None:
    """Load weights and adapters; of several replicas, what one that joins later must prove."""
    import asyncio

    from palestra.cli.served_model import load_weights
    from palestra.models.lora import read_adapter
    from palestra.rollouts.router import Proof, Router
    from palestra.types import SamplingParams
    from palestra.weights.manifests import full_manifest

    tensors = await asyncio.to_thread(load_weights, served.folder, merge)
    manifest = await asyncio.to_thread(full_manifest, served.version, tensors.items())
    await engine.start(manifest, tensors.items())
    proof = None
    if isinstance(engine, Router):
        probe = tuple(range(2, 18))
        proof = Proof(manifest, probe, await engine.score(probe, SamplingParams()), engine.agreement)
    for name, folder in adapters:
        config, parts = await asyncio.to_thread(read_adapter, folder)
        await engine.load_adapter(name, config, parts.items())
    return proof


async def _listen(app: web.Application, args: argparse.Namespace) -> tuple[Any, int]:
    from palestra.errors import PalestraError
    from palestra.rollouts.server.app import run_app

    try:
        return await run_app(app, args.host, args.port, socket=args.uds)
    except OSError as error:
        where = args.uds or f"{args.host} port {args.port}"
        raise PalestraError(
            f"{where} cannot be listened on: {error.strerror or error}",
            expected="an address of this machine and a free port",
            next_command=f"palestra serve {args.model} --port 0",
        ) from error


def _access(args: argparse.Namespace) -> tuple[bool, str]:
    """Whether only this machine may ask, and the token; made up where one is needed and none is given."""
    import ipaddress
    import secrets

    try:
        local = ipaddress.ip_address(args.host).is_loopback
    except ValueError:
        local = args.host == "localhost"
    return local, args.token or ("" if local else secrets.token_urlsafe(24))


def _adapter(given: str) -> tuple[str, Path]:
    name, equals, folder = given.partition("=")
    if not (name and equals and folder):
        raise UsageError(f"--adapter {given}", expected="--adapter NAME=FOLDER")
    return name, Path(folder)


def _announce(what: str, host: str, port: int, made_up_token: str) -> None:
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    print(f"serving {safe(what)} at {url}/v1; next: palestra chat {url}", flush=True)
    if made_up_token:
        print(f"token (shown once): {made_up_token}", flush=True)


COMMANDS = {
    "serve": Command(
        "Serve a model, a run's latest checkpoint or any checkpoint behind OpenAI's API.",
        _arguments,
        _serve,
        json=False,
        examples=(
            "palestra serve quickstart",
            "palestra serve ./my-model --port 8080 --adapter maths=./maths-lora",
            "PALESTRA_TOKEN=... palestra serve org/name --host 0.0.0.0",
        ),
    )
}
