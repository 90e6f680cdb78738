"""The C kernels of the decode step: compiled here once, checked against torch, or not used at all.

There is always a plain torch form of the same computation, so a machine without a
compiler computes too, only slower. A library is used only if it loaded and its
numbers were right; why there is none is kept for `palestra doctor`. It is built for
this very processor and cached under a name that says so. Threads are those of
torch's own OpenMP: the library brings no runtime of its own, which would fight with
torch's over the cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from palestra.models.cache import default_cache

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fopenmp", "-fPIC")
COMPILE_S = 60
MAX_DIM = 256
_KINDS = {torch.float32: "f32", torch.bfloat16: "bf16"}
_POINTER, _INT64, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int


class Kernels:
    """The functions of ``kernels.c`` over contiguous torch tensors on the CPU, in one dtype."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, threads: int) -> None:
        self._threads = threads
        self._attention = _function(
            library, "attention", dtype, [*[_POINTER] * 6, *[_INT64] * 6, _FLOAT, _INT]
        )
        self._norm = _function(library, "norm", dtype, [*[_POINTER] * 3, *[_INT64] * 2, _FLOAT, _INT])
        self._gated = _function(library, "gated", dtype, [*[_POINTER] * 2, *[_INT64] * 2, _INT])
        self._rotate = _function(library, "rotate", dtype, [*[_POINTER] * 3, *[_INT64] * 4, _INT])
        self._scores = torch.empty(0)

    def attention(
        self, queries_NHD: Tensor, keys_RSD: Tensor, values_RSD: Tensor, lengths_N: Tensor, kv_heads: int
    ) -> Tensor:
        """Row n's queries over the first ``lengths_N[n]`` positions of its key-value heads: [N, heads * D].

        Row n's keys are rows ``n * kv_heads`` onwards of ``keys_RSD``; lengths are int64.
        """
        rows, heads, dim = queries_NHD.shape
        capacity, group = keys_RSD.shape[1], heads // kv_heads
        if self._scores.numel() < self._threads * group * capacity:
            self._scores = torch.empty(self._threads * group * capacity)
        out_NE = torch.empty(rows, heads * dim, dtype=queries_NHD.dtype)
        pointers = [
            t.data_ptr() for t in (queries_NHD, keys_RSD, values_RSD, out_NE, self._scores, lengths_N)
        ]
        stride = queries_NHD.stride(0)
        self._attention(*pointers, rows, kv_heads, group, dim, capacity, stride, dim**-0.5, self._threads)
        return out_NE

    def norm(self, x_NH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm of every row."""
        out_NH = torch.empty_like(x_NH)
        rows, size = x_NH.shape
        self._norm(x_NH.data_ptr(), weight_H.data_ptr(), out_NH.data_ptr(), rows, size, eps, self._threads)
        return out_NH

    def gated(self, gate_up_NI: Tensor) -> Tensor:
        """``silu(gate) * up`` of rows that hold the gate and then up."""
        rows, both = gate_up_NI.shape
        out_NI = torch.empty(rows, both // 2, dtype=gate_up_NI.dtype)
        self._gated(gate_up_NI.data_ptr(), out_NI.data_ptr(), rows, both // 2, self._threads)
        return out_NI

    def rotate(self, x_NXD: Tensor, cos_N1D: Tensor, sin_N1F: Tensor) -> None:
        """Turn every head of ``x`` by its row's angles, in place; rows of ``x`` may be strided."""
        rows, heads, dim = x_NXD.shape
        self._rotate(
            *(t.data_ptr() for t in (x_NXD, cos_N1D, sin_N1F)),
            rows,
            heads,
            dim,
            x_NXD.stride(0),
            self._threads,
        )


def kernels(dtype: torch.dtype, threads: int) -> Kernels | None:
    """The kernels, or None where this machine has none that work."""
    library = _library()
    return None if isinstance(library, str) else Kernels(library, dtype, threads)


def missing_because() -> str:
    """Why there are no kernels here; empty where there are."""
    library = _library()
    return library if isinstance(library, str) else ""


@cache
def _library() -> ctypes.CDLL | str:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return "no C compiler was found (cc, or what CC names)"
    try:
        path = _built(compiler, default_cache() / "kernels")
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None)
        return f"the kernels could not be built or loaded: {output or error}"
    wrong = _wrong(library)
    return wrong or library


def _built(compiler: str, folder: Path) -> Path:
    """The library for this source, compiler and processor, compiled if it is not in ``folder`` yet."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, timeout=COMPILE_S, check=True
    ).stdout
    parts = [SOURCE.read_text(), *FLAGS, version, platform.machine(), _processor()]
    path = folder / f"{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        compiled, linked = Path(scratch) / "kernels.o", Path(scratch) / "kernels.so"
        # Linked without OpenMP's runtime: its symbols are found in the one that torch has loaded.
        for command in (
            [compiler, *FLAGS, "-c", str(SOURCE), "-o", str(compiled)],
            [compiler, "-shared", str(compiled), "-o", str(linked)],
        ):
            subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=True)
        linked.replace(path)
    return path


def _processor() -> str:
    """What ``-march=native`` looks at: the processor's model and its instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "|".join(sorted({line for line in lines if line.startswith(wanted)}))


def _wrong(library: ctypes.CDLL) -> str:
    """What the library computes wrongly on a small example; empty if nothing."""
    generator = torch.Generator().manual_seed(0)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        ours = Kernels(library, dtype, 2)
        queries = torch.randn(3, 4, 40, generator=generator).to(dtype)
        keys, values = (torch.randn(6, 16, 40, generator=generator).to(dtype) for _ in range(2))
        lengths = torch.tensor([1, 7, 16])
        found = ours.attention(queries, keys, values, lengths, 2).float().view(3, 4, 40)
        for row in range(3):
            for head in range(4):
                own = slice(0, int(lengths[row]))
                k, v = (t[row * 2 + head // 2, own].float() for t in (keys, values))
                expected = torch.softmax(k @ queries[row, head].float() * 40**-0.5, 0) @ v
                if not torch.allclose(found[row, head], expected, atol=tolerance):
                    return f"the kernels' attention is wrong in {dtype}"
    return ""


def _function(library: ctypes.CDLL, name: str, dtype: torch.dtype, arguments: list[type]) -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    function = library[f"{name}_{_KINDS[dtype]}"]
    function.argtypes, function.restype = arguments, None
    return function
