"""A router's HTTP API over a cache of whole prompts: enough for a client, without model, Redis or worker."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BLOCK_SIZE = 4


@dataclass
class FakeRouter:
    """Answers with the prompt's last words in capitals; a token is a word; keeps prompts per cache salt."""

    url: str = ""
    replicas: list[dict[str, Any]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    seen: set[tuple[str, str]] = field(default_factory=set)
    drained: list[str] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)
    queue: dict[str, Any] = field(default_factory=dict)
    has_busy_replica: bool = False  # one that refuses to reset its cache
    drains: bool = True  # whether a replica that is asked to drain ever leaves
    break_after: int | None = None  # pieces of an answer before an error event
    cut_after: int | None = None  # pieces of an answer before the connection is closed without a word

    def answer(self, body: dict[str, Any], prompt: str) -> tuple[list[str], dict[str, Any]]:
        self.bodies.append(body)
        words = prompt.split()
        key = (str(body.get("cache_salt", "")), prompt)
        cached = (len(words) - 1) // BLOCK_SIZE * BLOCK_SIZE if key in self.seen else 0
        self.seen.add(key)
        pieces = [word.upper() + " " for word in words[-body.get("max_tokens", 16) :]]
        usage = {
            "prompt_tokens": len(words),
            "completion_tokens": len(pieces),
            "total_tokens": len(words) + len(pieces),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        return pieces, usage


def replica(name: str, state: str = "READY", **changes: Any) -> dict[str, Any]:
    """One entry of /v1/replicas."""
    return {
        "id": name,
        "generation": "000000000001-abcdef",
        "state": state,
        "address": "127.0.0.1:40123",
        "model": "fake",
        "block_size": 16,
        "kv_blocks": 4096,
        "kv_blocks_used": 12,
        "kv_blocks_cached": 900,
        "kv_bytes_per_token": 23040,
        "waiting_tokens": 0,
        "running": 1,
        "mode": "fast",
        "protocol_version": 1,
        "hit_rate_1m": 0.91,
        "hit_rate_1h": 0.9,
        "hit_rate": 0.88,
        "prefill_tokens_per_s": 900,
        "lease_age_s": 0.4,
        **changes,
    }


def explanation(request_id: str) -> dict[str, Any]:
    """One answer of /v1/explain."""
    counts = ("device_blocks", "host_blocks", "pending_blocks", "matched_tokens", "waiting_tokens", "waiting_requests")
    times = ("predicted_ttft_s", "wait_s", "miss_s", "delayed_s", "displaced_s", "cost_s")
    common = {"state": "READY", "detail": "", "in_flight": 0, **dict.fromkeys((*counts, *times), 0)}
    return {
        "request_id": request_id,
        "decided_at_s": 1767225600.0,
        "policy": "warmfront",
        "chosen": "w0",
        "reason": "warmest",
        "prompt_tokens": 1000,
        "full_blocks": 62,
        "block_size": 16,
        "retries": 0,
        "left_out": 0,
        "cached_tokens": 992,
        "ttft_s": 0.02,
        "replicas": [
            {**common, "replica": "w0", "reason": "chosen", "device_blocks": 62, "matched_tokens": 992},
            {**common, "replica": "w1", "reason": "contract", "detail": "dtype is 'a', the fleet has 'b'"},
        ],
    }


@contextmanager
def fake_router() -> Iterator[FakeRouter]:
    """A running one, on a free port of 127.0.0.1."""
    state = FakeRouter(replicas=[replica("w0"), replica("w1", hit_rate_1m=0.1, hit_rate_verdict="prompts differ")])

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            match self.path:
                case "/v1/replicas":
                    self._json(200, {"fleet": "default", "replicas": state.replicas, "queue": state.queue})
                case "/v1/models":
                    models = [{"id": name, "object": "model"} for name in ("fake", *state.adapters)]
                    self._json(200, {"object": "list", "data": models})
                case "/readyz":
                    self._json(200, {})
                case _:
                    self._json(404, {"error": {"message": f"no path {self.path}"}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            match self.path:
                case "/v1/drain":
                    state.drained.append(body["replica"])
                    if state.drains:
                        state.replicas = [one for one in state.replicas if one["id"] != body["replica"]]
                    self._json(200, {"replica": body["replica"], "running": 1})
                case "/v1/cache/reset":
                    resets = [
                        {"replica": "w0", "outcome": "reset", "blocks": 1200, "detail": ""},
                        {"replica": "w1", "outcome": "busy", "blocks": 0, "detail": "requests hold blocks"},
                    ]
                    kept = resets if state.has_busy_replica else resets[:1]
                    complete = not state.has_busy_replica
                    self._json(200 if complete else 207, {"complete": complete, "replicas": kept})
                case "/v1/explain":
                    state.bodies.append(body)
                    one = explanation(body.get("request_id", ""))
                    self._json(200, {"explanations": [one]} if "last" in body else one)
                case "/v1/completions":
                    self._generate(body, body["prompt"], lambda text: {"text": text})
                case "/v1/chat/completions":
                    prompt = " ".join(message["content"] for message in body["messages"])
                    self._generate(body, prompt, lambda text: {"delta": {"content": text}})
                case _:
                    self._json(404, {"error": {"message": f"no path {self.path}"}})

        def _generate(self, body: dict[str, Any], prompt: str, choice: Any) -> None:
            if body.get("max_tokens", 1) > 1000:
                self._json(400, {"error": {"message": "max_tokens 1001 is more than the context of 1000 leaves"}})
                return
            pieces, usage = state.answer(body, prompt)
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("x-warmfront-replica", "w0")
            self.send_header("x-warmfront-matched-tokens", str(usage["prompt_tokens_details"]["cached_tokens"]))
            self.send_header("connection", "close")
            self.end_headers()
            for number, piece in enumerate(pieces):
                if number == state.break_after:
                    self._event({"error": {"message": "replica w0 is gone"}})
                    return
                if number == state.cut_after:
                    return
                last = number == len(pieces) - 1
                self._event({"choices": [{**choice(piece), "index": 0, "finish_reason": "length" if last else None}]})
            self._event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, event: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

        def _json(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
