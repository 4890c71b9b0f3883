"""What is checked before anything is started: all that would otherwise fail later, and less clearly."""

from __future__ import annotations

import importlib.util
import os
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.address import family_of
from common.tls import Certificates, TlsError
from router.config import RouterConfig
from warmfront.client import shown_by_environment
from warmfront.errors import WrongUse
from warmfront.flags import UpConfig
from warmfront.options import fill
from warmfront.store import check_redis
from worker.config import WorkerConfig
from worker.models.config import PACKAGED_MODEL, PACKAGED_MODEL_HINT

_LAST_PORT = 65535


def on_as_many_gpus(settings: UpConfig, params: dict[str, Any]) -> UpConfig:
    """No more replicas than GPUs, where nobody has said how many: each takes a whole one."""
    gpus = gpus_of(params["device"]) if params["engine"] == "model" else 0
    return replace(settings, replicas=min(settings.replicas, gpus)) if gpus else settings


def check_settings(settings: UpConfig, params: dict[str, Any]) -> None:
    """Refuses what cannot work before anything is started. Raises ``WrongUse``."""
    unused = {"redis_url": "redis://unused", "redis_password_file": None}
    worker = fill(WorkerConfig, params, **unused, replica_id="w0", listen="127.0.0.1", metrics_port=None)
    for flag, folder in worker.adapter_folders:
        if not folder.is_dir():
            raise WrongUse(f"{flag}: there is no folder {folder}")
    check_certificates(fill(RouterConfig, params, **unused))
    if params["engine"] == "model":
        find_model(params["model"])
        gpus = gpus_of(params["device"])
        if gpus and settings.replicas > gpus:
            raise WrongUse(
                f"--replicas {settings.replicas}: each takes one GPU, and here are {gpus} (or say --device cpu)"
            )
    taken: dict[int, str] = {}
    for name in ("http", "grpc", "metrics"):
        first, flag = params[f"{name}_port"], f"--{name}-port"
        many = settings.routers + settings.replicas if name == "metrics" else 1
        for port in range(first, first + many) if first else ():
            if port > _LAST_PORT:
                raise WrongUse(f"{flag} {first}: {many} ports are needed from there on, and {_LAST_PORT} is the last")
            if port in taken:
                raise WrongUse(f"{flag} {port}: {taken[port]} takes that one")
            taken[port] = flag
            probe_port(params["listen"], port, flag)
    if settings.ready_file is not None:
        check_folder(settings.ready_file.parent, "--ready-file")
        if settings.ready_file.is_dir():
            raise WrongUse(f"--ready-file: {settings.ready_file} is a folder")
    if settings.log_dir is not None:
        check_folder(settings.log_dir, "--log-dir")
    if settings.redis_url is not None:
        check_redis(settings.redis_url, params["redis_password_file"], fleet=params["fleet"])
    elif params["redis_password_file"] is not None:
        raise WrongUse("--redis-password-file needs --redis: the embedded Valkey has a password of its own")


def check_certificates(config: RouterConfig) -> None:
    """Raises ``WrongUse`` when the routers could not use their files, or would not let this process in."""
    if config.tls_files is None:
        return
    try:
        Certificates(config.tls_files)
    except TlsError as error:
        raise WrongUse(str(error)) from error
    if config.tls_client_ca is not None and None in shown_by_environment():
        raise WrongUse(
            "--tls-client-ca: `up` asks its own routers for their state, so it needs a certificate of that authority "
            "too: set WARMFRONT_CERT and WARMFRONT_KEY"
        )


def find_model(path: Path | None) -> None:
    """Whether there is a model to load; whether it is a good one only its loader can say."""
    if path is None:
        if importlib.util.find_spec(PACKAGED_MODEL) is None:
            raise WrongUse(f"no --model, and the packaged one is not installed: {PACKAGED_MODEL_HINT}")
    elif not path.exists():
        raise WrongUse(f"--model {path}: no such file or folder")
    elif path.is_dir() and not (path / "config.json").is_file():
        raise WrongUse(f"--model {path}: no config.json in that folder, so it holds no Hugging Face model")
    elif path.is_file() and path.suffix != ".gguf":
        raise WrongUse(f"--model {path}: neither a folder nor a .gguf file")


def check_folder(folder: Path, flag: str) -> None:
    """Makes a folder where there is none. Raises ``WrongUse`` when nothing can be written there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise WrongUse(f"{flag}: cannot make {folder}: {error.strerror}") from error
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise WrongUse(f"{flag}: {folder} cannot be written to: {error.strerror}") from error


def gpus_of(device: str) -> int:
    """How many GPUs workers with this ``--device`` may share out; 0 on the CPU or when it names one."""
    if device not in ("auto", "cuda"):
        return 0
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([name for name in listed.split(",") if name.strip() not in ("", "-1")])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def probe_port(host: str, port: int, flag: str) -> None:
    """Binds once without SO_REUSEPORT, which would hide somebody else on the port. Raises ``WrongUse``."""
    with socket.socket(family_of(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what waits in TIME_WAIT is nobody
        try:
            probe.bind((host, port))
        except OSError as error:
            raise WrongUse(f"{flag} {port}: {os.strerror(error.errno or 0)} on {host}; choose another one") from error
