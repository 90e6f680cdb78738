"""``/metrics``: what the engine and the server count, in Prometheus' text format."""

from __future__ import annotations

from aiohttp import web

from palestra.rollouts.server.serving import Serving


async def metrics(serving: Serving, request: web.Request) -> web.Response:
    """Totals since start, and the present load."""
    stats = serving.engine.stats()
    version = serving.engine.version
    rows = [
        ("requests_running", "gauge", "Completions being computed.", stats.running),
        ("requests_waiting", "gauge", "Completions that wait for a place.", stats.waiting),
        ("requests_live", "gauge", "Completions that this server has asked for.", serving.live),
        ("prompt_tokens_total", "counter", "Prompt tokens computed.", stats.prompt_tokens),
        ("reused_tokens_total", "counter", "Prompt tokens a session had left.", stats.reused_tokens),
        ("generated_tokens_total", "counter", "Tokens sampled.", stats.generated_tokens),
        ("busy_seconds_total", "counter", "Seconds in which something was computed.", stats.busy_s),
        ("version", "gauge", "Number of the policy version; -1 for none.", version.number if version else -1),
    ]
    lines: list[str] = []
    for name, kind, about, value in rows:
        lines += [
            f"# HELP palestra_{name} {about}",
            f"# TYPE palestra_{name} {kind}",
            f"palestra_{name} {value}",
        ]
    lines += [
        "# HELP palestra_http_requests_total Requests answered, by route and status.",
        "# TYPE palestra_http_requests_total counter",
        *(
            f'palestra_http_requests_total{{route="{route}",status="{status}"}} {count}'
            for (route, status), count in sorted(serving.answered.items())
        ),
    ]
    return web.Response(text="\n".join(lines) + "\n", content_type="text/plain", charset="utf-8")
