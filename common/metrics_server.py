"""The metrics port of a router or worker: its figures and whether it is well, for Prometheus and for probes.

Plain HTTP, whatever protects the other ports: a kubelet has no client certificate, and its gRPC probe knows no TLS.
Nothing here comes from a request.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app


class MetricsServer:
    """Answers ``/metrics``, ``/healthz`` and ``/readyz`` from a thread. Raises ``OSError`` when no port is free.

    ``why_not_ready`` and ``why_dead`` are asked in that thread; empty means well. ``port`` 0 takes any free one, else
    the first that is free of ``num_ports``, from ``port`` on.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        why_not_ready: Callable[[], str],
        why_dead: Callable[[], str],
        *,
        address: str,
        port: int,
        num_ports: int = 1,
    ) -> None:
        metrics: Any = make_wsgi_app(registry)

        def answer(environ: dict[str, Any], start_response: Any) -> Any:
            match environ["PATH_INFO"]:
                case "/healthz":
                    reason = why_dead()
                case "/readyz":
                    reason = why_dead() or why_not_ready()
                case "/metrics":
                    return metrics(environ, start_response)
                case _:
                    start_response("404 Not Found", [("content-type", "text/plain; charset=utf-8")])
                    return [b"there is /metrics, /healthz and /readyz\n"]
            status = "503 Service Unavailable" if reason else "200 OK"
            start_response(status, [("content-type", "text/plain; charset=utf-8")])
            return [f"{reason or 'ok'}\n".encode()]

        self._server = _bind(address, port, num_ports)
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


def _bind(address: str, first: int, num_ports: int) -> _Server:
    ports = range(first, min(first + num_ports, 1 << 16))
    for port in ports:
        try:
            return (_Server6 if ":" in address else _Server)((address, port), _SilentHandler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == ports[-1]:
                where = f"{address}:{first}" + (f" to {port}" if port > first else "")
                raise OSError(error.errno, f"cannot listen on {where} for metrics: {error.strerror}") from error
    raise ValueError(f"{num_ports} ports to choose from")


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A probe every other second is no news."""
