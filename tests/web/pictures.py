"""The pictures of the README: the page in Chromium over two Sparks whose figures are made up. Needs no daemon, engine or GPU.

python -m tests.web.pictures [FOLDER]      writes page-overview.png, page-model.png and page-playground.png, by default into deploy/pictures
"""

from __future__ import annotations

import io
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, Route

from tests.bench.page import FEW, target
from tests.support.daemon_process import ROOT
from tests.web.browser import WIDTH, chromium, context_of

GIB = 1 << 30
MOST_BYTES = 150_000
COLOURS = 256
HEIGHTS = {"page-overview": 680, "page-model": 785, "page-playground": 580}
FIRST_TOKEN_S, BETWEEN_TOKENS_S = 0.21, 0.027
SPARKS = {"192.168.100.10": "spark-1", "192.168.100.11": "spark-2"}
HEAD, OTHER = SPARKS
SERVING, LOADING = "qwen3-30b-a3b", "gpt-oss-120b"
QUESTION = "Why can a GB10 serve a model that does not fit into the memory of a gaming GPU?"
ANSWER = (
    "Because its CPU and its GPU share one memory of 128 GB. A gaming GPU has 16 to 32 GB of its own, and every weight must be there. "
    "On a GB10 the weights, the KV cache and the operating system take parts of the same 128 GB, so a model of 60 GB in 4 bit still leaves "
    "room for long contexts. The price is bandwidth: about 273 GB/s, so a dense model of that size answers slowly, while a mixture of "
    "experts, which reads only a few of them for each token, stays quick."
)
# Two streams are given in place of the daemon's: its document, and a chat at the pace of its figures. `answered` gives the rest.
_FEED = r"""([snapshot, parts, firstMs, betweenMs]) => {
  const real = window.fetch;
  const encoder = new TextEncoder();
  const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
  const headers = { "content-type": "text/event-stream" };
  const streamed = (source) => Promise.resolve(new Response(new ReadableStream(source), { headers }));
  const write = (controller, text) => controller.enqueue(encoder.encode(text));
  const chat = async (controller) => {
    for (const [place, part] of parts.entries()) {
      await wait(place === 0 ? firstMs : betweenMs);
      write(controller, `data: ${JSON.stringify(part)}\n\n`);
    }
    write(controller, "data: [DONE]\n\n");
    controller.close();
  };
  window.fetch = (path, options) => {
    if (String(path).endsWith("/live")) {
      const live = (one) => {
        write(one, `event: snapshot\nid: 1-1\ndata: ${JSON.stringify(snapshot)}\n\n`);
        setInterval(() => write(one, `event: change\nid: 1-2\ndata: {}\n\n`), 1000);
      };
      return streamed({ start: live });
    }
    return String(path).endsWith("/chat/completions") ? streamed({ start: (one) => void chat(one) }) : real(path, options);
  };
}"""


def node_of(address: str, engine: tuple[str, float, float], used_gib: float, busy: float) -> dict[str, Any]:
    """engine: a model with its host and device memory, GiB. used_gib: by the system."""
    model, host_gib, device_gib = engine
    total, cached = 119.7 * GIB, 3.1 * GIB
    free = total - cached - (used_gib + host_gib + device_gib + 0.6) * GIB
    reading = {
        "mem_total_bytes": total,
        "mem_available_bytes": free + 0.9 * cached,
        "mem_free_bytes": free,
        "cached_bytes": cached,
        "unaccounted_bytes": (device_gib + 0.6) * GIB,
        "psi_some_avg10": 0.4 * busy,
        "psi_full_avg10": 0.0,
        "slope_bytes_per_s": -0.9 * GIB if model == LOADING else -1.2e6,
        "floor_in_s": (free - 2 * GIB) / (0.9 * GIB) if model == LOADING else None,
        "level": "ok",
    }
    return {
        "address": address,
        "host": SPARKS[address],
        "local": address == HEAD,
        "agent": True,
        "reading": reading,
        "limits": {"soft": 8 * GIB, "hard": 5 * GIB, "floor": 3 * GIB},
        "engines": [{"model": model, "host_bytes": host_gib * GIB, "device_bytes": device_gib * GIB}],
        "reserved_bytes": (host_gib + device_gib + (31 if model == LOADING else 0)) * GIB,
        "uptime_s": 11 * 86400,
        "disk": {"total_bytes": 3.6e12, "free_bytes": 1.9e12},
        "gpu": {
            "name": "NVIDIA GB10",
            "power_w": 12 + 46 * busy,
            "busy_percent": 96 * busy,
            "celsius": 44 + 22 * busy,
            "clock_mhz": 2411,
            "throttled": [],
        },
    }


def model_of(name: str, source: str, at_s: float, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "source": source,
        "aliases": [],
        "state": "STOPPED",
        "want": "STOPPED",
        "wanted_by": "config",
        "origin": "file",
        "since_s": at_s - 7000,
        "in_flight": 0,
        "queued": 0,
        "ranks": [],
        "pin": False,
    } | more


def document(at_s: float) -> dict[str, Any]:
    """The live document: one model serves, one is being loaded, two are known."""
    rates = {
        "prompt_tokens_per_s": 1240.0,
        "generation_tokens_per_s": 186.4,
        "running": 5,
        "waiting": 0,
        "kv_usage": 0.37,
        "prefix_hit_ratio": 0.62,
        "ttft_p50_s": FIRST_TOKEN_S,
        "ttft_p95_s": 0.64,
        "itl_p50_s": BETWEEN_TOKENS_S,
        "itl_p95_s": 0.034,
        "e2e_p50_s": 7.9,
        "e2e_p95_s": 21.5,
        "acceptance": [0.81, 0.62],
        "joules_per_token": 0.31,
    }
    progress = {
        "phase": "loading",
        "fraction": 0.52,
        "format": "mxfp4",
        "source": "checkpoint",
        "bytes_done": 31.6 * GIB,
        "bytes_total": 60.8 * GIB,
        "bytes_per_s": 5.82e9,
        "eta_s": 5,
    }
    serving = {"state": "READY", "want": "RUNNING", "max_model_len": 65536, "memory_gib": 38, "rates": rates, "in_flight": 5, "pin": True}
    loading = {
        "state": "LOADING",
        "want": "RUNNING",
        "max_model_len": 131072,
        "memory_gib": 78,
        "progress": progress,
        "operation": "7",
        "queued": 1,
    }
    models = [
        model_of(
            SERVING, "Qwen/Qwen3-30B-A3B", at_s, ranks=[{"rank": 0, "node": HEAD, "pid": 4711}], progress={"kv_tokens": 241_664}, **serving
        ),
        model_of(
            LOADING, "openai/gpt-oss-120b", at_s, ranks=[{"rank": 0, "node": OTHER, "pid": 4820}], **(loading | {"since_s": at_s - 9})
        ),
        model_of("qwen3-embedding-8b", "Qwen/Qwen3-Embedding-8B", at_s),
        model_of("glm-4.5-air", "zai-org/GLM-4.5-Air", at_s),
    ]
    rails = [
        {"a": f"enp1s0f{port}np{port}", "b": f"enp1s0f{port}np{port}", "network": f"192.168.{100 + port}.0/24", "rdma": True}
        for port in (0, 1)
    ]
    cable = {"a": HEAD, "a_cage": 0, "b": OTHER, "b_cage": 0, "seen": True, "rails": rails, "rate_gb_s": 22.6, "verdict": "ok"}
    return {
        "boot": "made-up",
        "version": "0.1.0",
        "at_s": at_s,
        "settled": True,
        "draining": False,
        "conditions": [],
        "nodes": {
            HEAD: node_of(HEAD, (SERVING, 2.6, 35.1), 6.2, 0.93),
            OTHER: node_of(OTHER, (LOADING, 2.9, 33.4), 4.8, 0.31),
        },
        "models": {model["name"]: model for model in models},
        "operations": {},
        "cables": [cable],
        "events": {"last_seq": 40},
        "incidents": {},
    }


def history(names: list[str], span_s: int, at_s: float) -> dict[str, Any]:
    """Curves around the figures of the document."""
    now = document(at_s)
    flat = now["models"][SERVING]["rates"] | {"memory_bytes": 38 * GIB, "gpu_power_w": 54.8, "gpu_celsius": 64.5}

    def curve(figure: str) -> list[float]:
        value, shift = float(flat.get(figure) or 0), sum(map(ord, figure))
        if figure == "memory_bytes":
            return [value] * span_s
        waves = [
            0.14 * math.sin((t + 7 * shift) / 67) + 0.08 * math.sin((t + 3 * shift) / 23) + 0.05 * math.sin(t * t + shift)
            for t in range(span_s)
        ]
        some = [value * (1 + wave - waves[-1]) for wave in waves]
        return [float(round(one)) for one in some] if figure == "running" else some

    return {"step_s": 1, "end_s": at_s, "series": {name: curve(name.rpartition(".")[2]) for name in names}}


def answered(route: Route, at_s: float) -> None:
    """What the page asks besides the stream."""
    address = route.request.url
    if "/history" in address:
        names = [part.partition("=")[2].replace("%3A", ":") for part in address.partition("?")[2].split("&") if part.startswith("series=")]
        return route.fulfill(json=history(names, 900, at_s))
    if "/doctor" in address:
        return route.fulfill(json={"verdict": "ok", "nodes": list(SPARKS.values()), "findings": []})
    return route.fulfill(json={"incidents": [], "silent": []})


def chat() -> list[dict[str, Any]]:
    """The parts of the answer, a word each."""
    words = ANSWER.split(" ")
    parts: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"content": f"{word} "}}]} for word in words]
    usage = {"prompt_tokens": 31, "completion_tokens": len(words), "total_tokens": 31 + len(words)}
    return [*parts, {"choices": [], "usage": usage}]


def taken(page: Page, path: Path) -> None:
    """A picture with a palette, which halves it. RuntimeError where it is larger than a README bears."""
    page.set_viewport_size({"width": WIDTH, "height": HEIGHTS[path.stem]})
    page.wait_for_timeout(500)
    picture = Image.open(io.BytesIO(page.screenshot(animations="disabled"))).convert("RGB")
    picture.quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)
    if path.stat().st_size > MOST_BYTES:
        raise RuntimeError(f"{path.name} has {path.stat().st_size:,} bytes, and at most {MOST_BYTES:,} are wanted: take fewer COLOURS.")
    sys.stdout.write(f"{path.name}: {path.stat().st_size:,} bytes\n")


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "deploy" / "pictures"
    at_s = time.time()
    with target(**FEW) as url, chromium() as browser:
        page = context_of(browser).new_page()
        page.add_init_script(f"({_FEED})({json.dumps([document(at_s), chat(), 1000 * FIRST_TOKEN_S, 1000 * BETWEEN_TOKENS_S])})")
        for part in ("history?*", "doctor", "incidents"):
            page.route(f"**/admin/v1/{part}", lambda route: answered(route, at_s))
        page.goto(f"{url}/ui/")
        page.get_by_role("heading", name="Waiting").wait_for()
        taken(page, folder / "page-overview.png")
        page.evaluate(f"location.hash = '#/models/{SERVING}/live'")
        page.locator("figcaption").last.wait_for()
        taken(page, folder / "page-model.png")
        page.evaluate("location.hash = '#/playground'")
        page.get_by_label("Model", exact=True).select_option(SERVING)
        page.get_by_label("Message").fill(QUESTION)
        page.get_by_role("button", name="Send", exact=True).click()
        page.locator(".speed .word", has_text="done").wait_for()
        taken(page, folder / "page-playground.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
