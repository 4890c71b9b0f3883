"""The LoRA adapters of a worker: which name stands for which content, and what may be read from its disk.

Files are read and checked in a thread; the engine takes the weights between two steps. A name stands for one content at
a time: other content under it is refused until the name is free, so that nobody is answered by what they did not ask
for. Paths that come over the wire are read below ``--lora-dir`` only, with every symbolic link resolved.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cache.adapter import Adapter, is_adapter_name
from worker.peft import CONFIG_FILE, TENSORS_FILE, AdapterError, short

_MAX_CONFIG_BYTES = 1 << 20
_MAX_PATH_BYTES = 4096  # PATH_MAX of Linux; resolving takes time with the square of a path's length
_SHOWN_LENGTH = 300  # of a path: what an error says must fit into gRPC's 8 KiB
_PICKLED_FILE = "adapter_model.bin"
_T = TypeVar("_T")


class AdaptersOffError(Exception):
    """This worker loads no adapters at run time."""


class AdapterConflictError(Exception):
    """The name stands for other content, or there is no room: unload something first."""


class UnknownAdapterError(Exception):
    """No such adapter is loaded here. It may be elsewhere."""


class AdapterReader(Protocol):
    """Makes of an adapter's files what the runner takes. Called in any thread."""

    max_bytes: int  # of the file with the tensors

    def __call__(self, config: bytes, tensors: bytes) -> tuple[Any, int]:
        """The weights, and their largest rank. Raises ``AdapterError``."""


class AdapterEngine(Protocol):
    """The engine's part: see ``worker.engine.Engine``."""

    def add_adapter(self, adapter: str, weights: Any, max_adapters: int) -> Future[None]:
        """Serve it."""

    def drop_adapter(self, adapter: str) -> Future[int]:
        """Free it when its last request has ended."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """One that requests may name."""

    adapter: Adapter
    rank: int


class Adapters:
    """Names and their content. The event loop owns it. Loads happen one at a time; what has begun is finished."""

    def __init__(
        self,
        engine: AdapterEngine,
        reader: AdapterReader,
        *,
        folders: Sequence[Path],
        max_adapters: int,
        base: str,
        publish: Callable[[], Awaitable[None]],
    ) -> None:
        """``base`` is the model's own name, which no adapter may have; ``publish`` tells the routers of a change."""
        self._engine = engine
        self._reader = reader
        self._folders = folders
        self._max_adapters = max_adapters
        self._base = base
        self._publish = publish
        self._by_name: dict[str, LoadedAdapter] = {}
        self._loading = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def listed(self) -> list[LoadedAdapter]:
        """Those that requests may name, by name."""
        return [self._by_name[name] for name in sorted(self._by_name)]

    def find(self, name: str, version: str = "") -> Adapter:
        """The adapter that a request means; ``version`` empty: whatever is loaded. Raises ``UnknownAdapterError``."""
        loaded = self._by_name.get(name)
        if loaded is None:
            known = ", ".join(sorted(self._by_name)) or "none"
            raise UnknownAdapterError(f"lora: no adapter {short(name)} is loaded here; loaded: {known}")
        if version and version != loaded.adapter.version:
            raise UnknownAdapterError(
                f"lora: adapter {name!r} of version {version[:12]} is not loaded here; "
                f"its version here is {loaded.adapter.version[:12]}"
            )
        return loaded.adapter

    async def load(self, name: str, path: str) -> tuple[LoadedAdapter, bool]:
        """Load the folder at ``path``, as somebody on the wire asks; true when it stood there already.

        Raises ``AdaptersOffError``, ``AdapterError`` and ``AdapterConflictError``.
        """
        if not self._folders:
            raise AdaptersOffError("lora: this worker loads no adapters: start it with --lora-dir FOLDER to allow it")
        return await self._finished(self._load(name, lambda: find_folder(path, self._folders)))

    async def load_own(self, name: str, folder: Path) -> None:
        """Load what the worker was started with, wherever it lies. Raises as ``load`` does."""
        await self._finished(self._load(name, lambda: (folder, Path(folder.absolute().anchor))))

    async def unload(self, name: str) -> tuple[LoadedAdapter, int]:
        """Take no more requests for it; how many still run with it. Raises ``UnknownAdapterError``."""
        return await self._finished(self._unload(name))

    async def _finished(self, change: Coroutine[Any, Any, _T]) -> _T:
        """The result of ``change``, which goes on when whoever asked for it has left."""
        task = asyncio.get_running_loop().create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _load(self, name: str, find: Callable[[], tuple[Path, Path]]) -> tuple[LoadedAdapter, bool]:
        if not is_adapter_name(name):
            raise AdapterError(f"lora: {short(name)} is no name: use up to 128 letters, digits and . _ : / -")
        if name == self._base:
            raise AdapterError(f"lora: {name!r} is the name of the model itself: take another one")
        folder, root = await asyncio.to_thread(find)
        async with self._loading:
            if name not in self._by_name and len(self._by_name) >= self._max_adapters:
                raise AdapterConflictError(
                    f"lora: {self._max_adapters} adapters are loaded, as many as --max-loras allows: unload one first"
                )
            files = await asyncio.to_thread(read_files, folder, root, self._reader.max_bytes)
            if (known := self._by_name.get(name)) is not None:
                if known.adapter.version == files.version:
                    return known, True
                raise AdapterConflictError(
                    f"lora: {name!r} stands for other content here (version {known.adapter.version[:12]}, this is "
                    f"{files.version[:12]}): unload it first, or take another name"
                )
            weights, rank = await asyncio.to_thread(self._reader, files.config, files.tensors)
            loaded = LoadedAdapter(Adapter(name, files.version), rank)
            await asyncio.wrap_future(self._engine.add_adapter(str(loaded.adapter), weights, self._max_adapters))
            self._by_name[name] = loaded
            await self._publish()
            return loaded, False

    async def _unload(self, name: str) -> tuple[LoadedAdapter, int]:
        loaded = self._by_name.pop(name, None)
        if loaded is None:
            raise UnknownAdapterError(f"lora: no adapter {short(name)} is loaded here")
        # The engine does as it is told in this order: a load of the same content that comes now is not undone by this.
        num_running = await asyncio.wrap_future(self._engine.drop_adapter(str(loaded.adapter)))
        await self._publish()
        return loaded, num_running


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter's two files, and the digest of both."""

    config: bytes
    tensors: bytes
    version: str


def find_folder(path: str, folders: Sequence[Path]) -> tuple[Path, Path]:
    """The folder that ``path`` means, and the one of ``folders`` that it lies below. Raises ``AdapterError``.

    What lies elsewhere is refused in the same words whether or not it exists.
    """
    if not path or "\0" in path:
        raise AdapterError("lora: path is missing: name the adapter's folder")
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise AdapterError(f"lora: path is longer than the {_MAX_PATH_BYTES} bytes that one may have")
    for folder in folders:
        # A loop of links is a RuntimeError; a name may be too long, or a folder above it closed to us.
        with contextlib.suppress(OSError, RuntimeError):
            root = folder.resolve()
            found = (root / path).resolve()  # an absolute path stays as it is
            if found.is_relative_to(root) and (found.is_dir() or Path(path).is_absolute()):
                return found, root
    raise AdapterError(f"lora: {short(path, _SHOWN_LENGTH)} is no folder below any --lora-dir of this worker")


def read_files(folder: Path, root: Path, max_bytes: int) -> AdapterFiles:
    """The files in ``folder``, neither of which may lie outside ``root``. Raises ``AdapterError``."""
    try:
        is_pickled = not (folder / TENSORS_FILE).exists() and (folder / _PICKLED_FILE).exists()
    except OSError as error:
        raise AdapterError(f"lora: cannot read {_shown(folder, root)}: {error.strerror}") from error
    if is_pickled:
        raise AdapterError(
            f"lora: {_shown(folder, root)} has {_PICKLED_FILE} and no {TENSORS_FILE}: pickled weights "
            "can run code and are not read; save it with safe_serialization"
        )
    config = _read(folder / CONFIG_FILE, root, _MAX_CONFIG_BYTES)
    tensors = _read(folder / TENSORS_FILE, root, max_bytes)
    digest = hashlib.sha256(len(config).to_bytes(8, "little"))
    digest.update(config)
    digest.update(tensors)
    return AdapterFiles(config, tensors, digest.hexdigest())


def _shown(path: Path, root: Path) -> str:
    """``path`` as a message names it: where a worker keeps its adapters is no business of those who load them."""
    if root == Path(root.anchor):  # the operator's own
        return repr(str(path))
    return short(str(path.relative_to(root)), _SHOWN_LENGTH)


def _read(path: Path, root: Path, max_bytes: int) -> bytes:
    shown = _shown(path, root)
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(root.resolve()):
            raise AdapterError(f"lora: {shown} leads out of its --lora-dir")
        # What was resolved a moment ago is opened as it stands; a pipe put in its place would never end.
        with open(os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise AdapterError(f"lora: {shown} is no ordinary file")
            if status.st_size > max_bytes:
                raise AdapterError(f"lora: {shown} has {status.st_size} bytes, more than the {max_bytes} that can fit")
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise AdapterError(f"lora: cannot read {shown}: {error.strerror}") from error
    except RuntimeError as error:  # what ``resolve`` makes of a loop of links
        raise AdapterError(f"lora: cannot read {shown}: {os.strerror(errno.ELOOP)}") from error
    if len(data) > max_bytes:
        raise AdapterError(f"lora: {shown} has more than the {max_bytes} bytes that can fit")
    return data
