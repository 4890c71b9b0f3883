"""The optional compiled kernel for bfloat16 on CPUs: where it is, whether it can run here, how to build it.

It is built ahead (``python -m worker.cpu_kernel``, ``make cpu-kernel``) into the virtual environment and loaded through
ctypes: it knows nothing of torch or Python, so one build serves any version of both. Its name holds a hash of its
source, and one of other sources counts as not built. Without it everything runs on torch's own operators.
"""

import ctypes
import hashlib
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch  # before the kernel: its OpenMP is then the kernel's too, with one set of threads

SOURCE = Path(__file__).with_name("kernel.cpp")
_FLAGS = ("-O2", "-std=c++20", "-shared", "-fPIC", "-fopenmp")  # at -O3 g++ 12 spills tiles of 5 rows: half the speed

_POINTER, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_long, ctypes.c_double
_SIGNATURES: dict[str, list[type]] = {
    "wf_pack": [_POINTER] * 2 + [_LONG] * 2,
    "wf_linear": [_POINTER] * 5 + [_LONG] * 5,
    "wf_rms_norm": [_POINTER] * 3 + [_LONG] * 2 + [_DOUBLE, _LONG],
    "wf_rotate": [_POINTER] * 8 + [_LONG] * 4 + [_DOUBLE, _LONG],
    "wf_attend": [_POINTER] * 7 + [_LONG] * 8,
}


class KernelUnavailableError(RuntimeError):
    """The compiled kernel cannot be used here; the message says why."""


class KernelBuildError(RuntimeError):
    """The compiler is missing or refused the source."""


def built_path() -> Path:
    """Where a kernel of this source belongs: in the environment of the running Python."""
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(_FLAGS).encode()).hexdigest()
    return Path(sys.prefix) / "lib" / "warmfront" / f"cpu-kernel-{digest[:12]}.so"


def build() -> Path:
    """Compile the kernel with ``c++``: a few seconds. Raises ``KernelBuildError``."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise KernelBuildError("no C++ compiler here: sudo apt-get install -y g++")
    path = built_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_suffix(".part")  # whoever loads it meanwhile finds no half of it
    run = subprocess.run([compiler, *_FLAGS, str(SOURCE), "-o", str(made)], capture_output=True, text=True)
    if run.returncode:
        raise KernelBuildError(f"{compiler} failed:\n{run.stderr[-2000:]}")
    made.replace(path)
    return path


@cache
def library() -> ctypes.CDLL:
    """The kernel, ready to be called. Raises ``KernelUnavailableError``."""
    path = built_path()
    if not path.exists():
        raise KernelUnavailableError("it is not built here (make cpu-kernel, or python -m worker.cpu_kernel)")
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelUnavailableError(f"it does not load: {error}") from error
    if not loaded.wf_supported():
        raise KernelUnavailableError("this CPU has no AVX-512 BF16")
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded


def obstacle(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why numbers of ``dtype`` on ``device`` cannot go through the kernel; None: they can."""
    if device.type != "cpu":
        return "it is for CPUs"
    if dtype != torch.bfloat16:
        return f"it computes bfloat16, not {str(dtype).removeprefix('torch.')}"
    try:
        library()
    except KernelUnavailableError as error:
        return str(error)
    return None
