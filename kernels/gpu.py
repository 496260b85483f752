"""The one module that touches numba.cuda: what a kernel is written with, and how it is launched.

With NUMBA_ENABLE_CUDASIM=1 in the environment before the first import, the same kernels run in
Numba's simulator, thread by thread in Python, on NumPy arrays.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np

if not hasattr(np, "row_stack"):  # numba-cuda 0.30 reads it while compiling; NumPy 2.5 removed it
    np.row_stack = np.vstack  # noqa: NPY201

from numba import cuda, float32, int32, types, uint32, uint64
from numba.core import config
from numba.cuda.core.errors import NumbaPerformanceWarning

__all__ = [
    "ROW_THREADS",
    "SIMULATED",
    "SharedMemoryError",
    "available",
    "compiled",
    "cuda",
    "device",
    "exp2",
    "float32",
    "int32",
    "kernel",
    "launch",
    "load",
    "load4",
    "log",
    "multiprocessors",
    "narrow",
    "shared_memory_bytes",
    "types",
    "uint32",
    "uint64",
    "widen",
]

SIMULATED = bool(config.ENABLE_CUDASIM)
ROW_THREADS = 8 if SIMULATED else 256  # of a block that works on one row, or on a few

# A helper is inlined into the kernel that calls it, so that arrays passed to it stay in registers,
# and so that a kernel compiles without a GPU.
device = cuda.jit(device=True, inline="always")
kernel = cuda.jit


class SharedMemoryError(ValueError):
    """The tiles of a kernel do not fit in the shared memory of a block."""


if SIMULATED:

    def load(A: Any, i: Any, j: Any) -> Any:
        """A[i, j] from L2: it does not enter L1, so an element costs what the model says."""
        return A[i, j]

    def load4(sm: Any, i: Any) -> Any:
        """Four consecutive floats of shared memory; i is a multiple of 4."""
        return sm[i], sm[i + 1], sm[i + 2], sm[i + 3]

    def exp2(x: Any) -> Any:
        """2 to the power of x."""
        return np.exp2(x)

    def log(x: Any) -> Any:
        """Natural logarithm, -inf at 0."""
        return np.log(x) if x != 0 else np.float32(-np.inf)

    def _half(bits: Any) -> Any:
        return np.float32(np.uint16(bits).view(np.float16))

    def _half_bits(x: Any) -> Any:
        return np.float16(x).view(np.uint16)

    def _float_of(bits: Any) -> Any:
        return np.uint32(bits).view(np.float32)

    def _bits_of(x: Any) -> Any:
        return np.float32(x).view(np.uint32)

else:
    from llvmlite import ir
    from numba.cuda import libdevice
    from numba.cuda.cache_hints import ldcg_intrinsic
    from numba.cuda.extending import intrinsic

    @device
    def load(A, i, j):
        """A[i, j] from L2: it does not enter L1, so an element costs what the model says."""
        return ldcg_intrinsic(A, (i, j))

    @intrinsic
    def load4(typingctx, sm, i):
        """Four consecutive floats of shared memory in one instruction; i is a multiple of 4."""

        def generate(context, builder, sig, args):
            four = ir.VectorType(ir.FloatType(), 4)
            array = context.make_array(sig.args[0])(context, builder, args[0])
            address = builder.bitcast(builder.gep(array.data, [args[1]]), four.as_pointer())
            x = builder.load(address, align=16)
            parts = [builder.extract_element(x, ir.Constant(ir.IntType(32), n)) for n in range(4)]
            return context.make_tuple(builder, sig.return_type, parts)

        return types.UniTuple(types.float32, 4)(sm, i), generate

    @device
    def exp2(x):
        """2 to the power of x."""
        return libdevice.exp2f(x)

    @device
    def log(x):
        """Natural logarithm, -inf at 0."""
        return libdevice.logf(x)

    @device
    def _half(bits):
        return libdevice.half2float(bits)

    @device
    def _half_bits(x):
        return libdevice.float2half_rn(x)

    @device
    def _float_of(bits):
        return libdevice.int_as_float(int32(bits))

    @device
    def _bits_of(x):
        return uint32(libdevice.float_as_int(x))


@device
def _float32(x):
    return float32(x)


@device
def _bfloat(bits):
    return _float_of(uint32(bits) << uint32(16))


@device
def _bfloat_bits(x):
    bits = uint64(_bits_of(x))
    if x != x:
        return np.uint16(0x7FC0)
    return np.uint16((bits + uint64(0x7FFF) + ((bits >> uint64(16)) & uint64(1))) >> uint64(16))


_WIDEN = {"float32": _float32, "float16": _half, "bfloat16": _bfloat}
_NARROW = {"float32": _float32, "float16": _half_bits, "bfloat16": _bfloat_bits}


def widen(dtype: str) -> Any:
    """The device function that makes a float32 of a stored number; 16-bit ones come as bits."""
    return _WIDEN[dtype]


def narrow(dtype: str) -> Any:
    """The device function that rounds a float32 to what is stored."""
    return _NARROW[dtype]


def shared_memory_bytes() -> int:
    """What one block may have of shared memory, on the current GPU."""
    if SIMULATED:
        return 227 * 1024
    return int(cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)


def multiprocessors() -> int:
    """How many multiprocessors the current GPU has."""
    return 4 if SIMULATED else int(cuda.get_current_device().MULTIPROCESSOR_COUNT)


def available() -> str:
    """Empty if kernels can run here, otherwise the reason why not."""
    if SIMULATED or cuda.is_available():
        return ""
    return (
        "no usable NVIDIA GPU was found: Numba sees none. NUMBA_ENABLE_CUDASIM=1, set before "
        "Python starts, runs small sizes in Numba's simulator"
    )


@cache
def _allow(function: Any, signature: Any, shared_bytes: int, context: int) -> None:
    """Let a compiled kernel have more than the 48 KB of shared memory that it gets unasked."""
    from numba.cuda.cudadrv import driver
    from numba.cuda.cudadrv.driver import binding

    loaded = function.overloads[signature]._codelibrary.get_cufunc()
    attribute = binding.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    driver.driver.cuKernelSetAttribute(attribute, shared_bytes, loaded.handle, loaded.device.id)


def launch(
    function: Any, grid: int, threads: int, shared_bytes: int, stream: int, args: Any
) -> None:
    """Run a kernel on a one-dimensional grid, on the stream with this address (0: the default)."""
    if grid == 0:
        return
    if SIMULATED:
        function[grid, threads, 0, shared_bytes](*args)
        return
    if shared_bytes > 48 * 1024:
        signature = tuple(function.typeof_pyval(a) for a in args)
        function.compile(signature)
        _allow(function, signature, shared_bytes, cuda.current_context().device.id)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumbaPerformanceWarning)  # small grids are fine
        function[grid, threads, cuda.external_stream(stream) if stream else 0, shared_bytes](*args)


@cache
def _ptx(function: Any, signature: Any) -> str:
    """PTX for compute capability 8.0, which later ones assemble too."""
    return str(cuda.compile_ptx(function.py_func, types.void(*signature), cc=(8, 0))[0])


def compiled(function: Any, signature: Any, arch: str) -> dict[str, int]:
    """Compile and assemble a kernel without a GPU: what the assembler says of it.

    Parameters
    ----------
    function : kernel
    signature : tuple of Numba types
    arch : str
        "sm_80", "sm_90a", ...

    Returns
    -------
    dict
        registers (a thread), spill_bytes, stack_bytes (local memory), and wide_floats, the
        instructions on float64: a Python literal that widens what should be float32.
    """
    import re

    from cuda.core import Linker, LinkerOptions, ObjectCode

    ptx = _ptx(function, signature)
    options = LinkerOptions(arch=arch, ptxas_options=["-v"])
    linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=options)
    linker.link("cubin")
    log = linker.get_info_log()

    def number(pattern: str) -> int:
        return sum(map(int, re.findall(pattern, log)))

    return {
        "registers": number(r"Used (\d+) registers"),
        "spill_bytes": number(r"(\d+) bytes spill"),
        "stack_bytes": number(r"(\d+) bytes stack"),
        "wide_floats": len(re.findall(r"\.f64", ptx)),
    }
