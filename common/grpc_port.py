"""The port of a gRPC server, ours alone unless it is to be shared."""

from __future__ import annotations

import socket

import grpc.aio

from common.address import family_of, host_port
from common.tls import Certificates, grpc_server_credentials


def listen(
    server: grpc.aio.Server, host: str, port: int, certificates: Certificates | None, *, is_shared: bool = False
) -> int:
    """Have ``server`` listen, with TLS where there are certificates; the port. ``port`` 0: any free one.

    Raises ``OSError`` when it cannot be had.
    """
    address = host_port(host, port)
    try:
        # gRPC writes a page of its own about a taken port. A shared one is not tried: clients might be sent there.
        if port and not is_shared:
            with socket.create_server((host, port), family=family_of(host)):
                pass
        if certificates is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, grpc_server_credentials(certificates))
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise OSError(f"cannot listen on {address} for gRPC: {reason}") from error
