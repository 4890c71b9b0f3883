"""The part of a Kubernetes API server that Helm needs: objects in memory, over HTTP on 127.0.0.1.

It keeps what it is given, and refuses what Kubernetes refuses: changes of fields that are set once.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

Object = dict[str, Any]

# group/version: kinds by the name that stands in URLs.
KINDS: dict[str, dict[str, str]] = {
    "v1": {
        "configmaps": "ConfigMap",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "pods": "Pod",
        "secrets": "Secret",
        "serviceaccounts": "ServiceAccount",
        "services": "Service",
    },
    "apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet"},
    "networking.k8s.io/v1": {"ingresses": "Ingress", "networkpolicies": "NetworkPolicy"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
}
_PROTOBUF = b"k8s\0"
# Fields of a spec that may change, for kinds in which others may not.
_CHANGEABLE = {
    "StatefulSet": {"replicas", "template", "updateStrategy", "persistentVolumeClaimRetentionPolicy"},
    "PersistentVolumeClaim": {"resources"},
}
_SET_ONCE = {"Deployment": {"selector"}, "Service": {"clusterIP"}}


class RefusedError(Exception):
    """An HTTP status and Kubernetes' word for it."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


class Cluster:
    """Objects by kind and name, in one namespace."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self._version = 0

    def get(self, kind: str, name: str) -> Object:
        """A copy. Raises ``RefusedError``."""
        if (kind, name) not in self.objects:
            raise RefusedError(404, "NotFound", f"{kind} {name!r} not found")
        return copy.deepcopy(self.objects[kind, name])

    def list(self, kind: str, selector: str = "") -> list[Object]:
        """Those whose labels have all of ``a=b,c=d``."""
        wanted = dict(part.split("=", 1) for part in selector.split(",") if part)
        return [
            copy.deepcopy(item)
            for (one, _), item in self.objects.items()
            if one == kind and wanted.items() <= item["metadata"].get("labels", {}).items()
        ]

    def put(self, item: Object, *, is_new: bool = False) -> Object:
        """Creates or replaces. Raises ``RefusedError``."""
        kind, name = item["kind"], item["metadata"]["name"]
        before = self.objects.get((kind, name))
        if before is not None and is_new:
            raise RefusedError(409, "AlreadyExists", f"{kind} {name!r} already exists")
        if before is not None:
            _check_change(before, item)
        self._version += 1
        kept = copy.deepcopy(item)
        kept["metadata"] |= {"resourceVersion": str(self._version), "uid": f"{kind}-{name}"}
        self.objects[kind, name] = kept
        return copy.deepcopy(kept)

    def delete(self, kind: str, name: str) -> Object:
        """Raises ``RefusedError``."""
        item = self.get(kind, name)
        del self.objects[kind, name]
        return item


def _check_change(before: Object, after: Object) -> None:
    kind = before["kind"]
    old, new = before.get("spec", {}), after.get("spec", {})
    fields = old.keys() | new.keys()
    fixed = fields - _CHANGEABLE[kind] if kind in _CHANGEABLE else fields & _SET_ONCE.get(kind, set())
    for field in sorted(fixed):
        if old.get(field) != new.get(field):
            name = before["metadata"]["name"]
            raise RefusedError(422, "Invalid", f"{kind} {name!r} is invalid: spec.{field}: field is immutable")


@contextlib.contextmanager
def serve(cluster: Cluster) -> Iterator[str]:
    """The URL of a server for it."""

    class Handler(_Handler):
        state = cluster

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: Cluster
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(lambda: self.state.put(self._body(), is_new=True))

    def do_PUT(self) -> None:
        self._answer(lambda: self.state.put(self._body()))

    def do_PATCH(self) -> None:
        self._answer(self._patch)

    def do_DELETE(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))  # how to delete; left there it would be a request
        kind, name = self._place()
        self._answer(lambda: self.state.delete(kind, name))

    def _get(self) -> Object:
        path = urlsplit(self.path).path
        if (found := _discovery(path)) is not None:
            return found
        kind, name = self._place()
        if name:
            return self.state.get(kind, name)
        query = parse_qs(urlsplit(self.path).query)
        items = self.state.list(kind, query.get("labelSelector", [""])[0])
        api = next(group for group, kinds in KINDS.items() if kind in kinds.values())
        return {"kind": f"{kind}List", "apiVersion": api, "metadata": {"resourceVersion": "1"}, "items": items}

    def _patch(self) -> Object:
        if "apply-patch" not in self.headers["Content-Type"]:
            raise RefusedError(415, "UnsupportedMediaType", "only server-side apply")
        return self.state.put(self._body())

    def _place(self) -> tuple[str, str]:
        words = urlsplit(self.path).path.strip("/").split("/")
        api, rest = ("v1", words[2:]) if words[0] == "api" else ("/".join(words[1:3]), words[3:])
        plural, name = (*rest[2:], "", "")[:2]
        if plural not in KINDS.get(api, {}):
            raise RefusedError(404, "NotFound", f"no {api} {plural} here")
        return KINDS[api][plural], name

    def _body(self) -> Object:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if data.startswith(_PROTOBUF):
            return _release_secret(data.removeprefix(_PROTOBUF))
        body: Object = yaml.safe_load(data)
        return body

    def _answer(self, make: Any) -> None:
        try:
            code, content = 200, make()
        except RefusedError as refused:
            code = refused.code
            content = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
            content |= {"reason": refused.reason, "message": str(refused)}
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of each length-delimited field of a protobuf message; others are passed over."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    while position < len(data):
        key = varint()
        if key & 7 == 2:
            size = varint()
            yield key >> 3, data[position : position + size]
            position += size
        else:
            assert key & 7 == 0, "only varints and bytes stand in what Helm writes"
            varint()


def _release_secret(envelope: bytes) -> Object:
    """Helm keeps its releases in Secrets, and sends those as protobuf: k8s.io/api/core/v1/generated.proto."""
    secret = list(_fields(dict(_fields(envelope))[2]))  # runtime.Unknown.raw
    metadata = list(_fields(dict(secret)[1]))
    labels = [dict(_fields(entry)) for number, entry in metadata if number == 11]
    data = [dict(_fields(entry)) for number, entry in secret if number == 2]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": dict(metadata)[1].decode(),
            "labels": {entry[1].decode(): entry[2].decode() for entry in labels},
        },
        "type": dict(secret)[3].decode(),
        "data": {entry[1].decode(): base64.b64encode(entry[2]).decode() for entry in data},
    }


def _discovery(path: str) -> Mapping[str, Any] | None:
    if path == "/version":
        return {"major": "1", "minor": "37", "gitVersion": "v1.37.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = []
        for api in KINDS:
            if "/" in api:
                version = {"groupVersion": api, "version": api.split("/")[1]}
                groups.append({"name": api.split("/")[0], "versions": [version], "preferredVersion": version})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    api = path.removeprefix("/apis/").removeprefix("/api/")
    if api in KINDS:
        verbs = ["create", "delete", "get", "list", "patch", "update"]
        resources = [
            {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
            for plural, kind in KINDS[api].items()
        ]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api, "resources": resources}
    return None
