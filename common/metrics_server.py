"""The metrics port of a router or worker: its figures and whether it is well, for Prometheus and for probes.

Plain HTTP, whatever protects the other ports: a kubelet has no client certificate, and its gRPC probe knows no TLS.
Nothing here comes from a request.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app


class MetricsServer:
    """Answers ``/metrics``, ``/healthz`` and ``/readyz`` from a thread. Raises ``OSError`` when the port is taken.

    ``why_not_ready`` and ``why_dead`` are asked in that thread; empty means well. ``port`` 0 takes any free one.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        why_not_ready: Callable[[], str],
        why_dead: Callable[[], str],
        *,
        address: str,
        port: int,
    ) -> None:
        metrics: Any = make_wsgi_app(registry)

        def answer(environ: dict[str, Any], start_response: Any) -> Any:
            match environ["PATH_INFO"]:
                case "/healthz":
                    reason = why_dead()
                case "/readyz":
                    reason = why_dead() or why_not_ready()
                case _:
                    return metrics(environ, start_response)
            status = "503 Service Unavailable" if reason else "200 OK"
            start_response(status, [("content-type", "text/plain; charset=utf-8")])
            return [f"{reason or 'ok'}\n".encode()]

        try:
            self._server = (_Server6 if ":" in address else _Server)((address, port), _SilentHandler)
        except OSError as error:
            raise OSError(error.errno, f"cannot listen on {address}:{port} for metrics: {error.strerror}") from error
        self._server.set_app(answer)
        self.port = int(self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A probe every other second is no news."""
