"""What a kernel is written with, and how it is launched: with cache, all that touches numba.cuda.

With NUMBA_ENABLE_CUDASIM=1 in the environment before the first import, the same kernels run in
Numba's simulator, thread by thread in Python, on NumPy arrays.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from functools import cache
from typing import Any
from unittest import mock

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
    "add",
    "available",
    "compute_capability",
    "cuda",
    "device",
    "exp2",
    "float32",
    "in_fours",
    "int32",
    "kernel",
    "launch",
    "load",
    "load4",
    "load_four",
    "log",
    "multiprocessors",
    "narrow",
    "shared_memory_bytes",
    "store4",
    "store_four",
    "syncwarp",
    "types",
    "uint32",
    "uint64",
    "widen",
]

SIMULATED = bool(config.ENABLE_CUDASIM)
ROW_THREADS = 8 if SIMULATED else 256  # of a block that works on one row, or on a few


def device(function: Any) -> Any:
    """The decorator of a helper of kernels.

    It is inlined into the kernel that calls it, so that arrays passed to it stay in registers: by
    LLVM, as inlining by Numba takes six times as long to compile. In the simulator only one that
    names `cuda` needs it.
    """
    if SIMULATED:
        return cuda.jit(device=True)(function) if "cuda" in function.__code__.co_names else function
    return cuda.jit(device=True, forceinline=True)(function)


def kernel(threads: int, blocks: int = 0) -> Any:
    """The decorator of a kernel that is launched with so many threads a block.

    The assembler must know: for want of it, it saves registers and keeps fewer loads under way.
    blocks: how many a multiprocessor is to have at a time, if it matters: where `setmaxnreg` shares
    registers out anew, the assembler must know how many a thread begins with. Once compiled, a
    kernel is kept on disk (see cache).
    """

    def decorate(function: Any) -> Any:
        if SIMULATED:
            return cuda.jit(function)
        from .cache import KernelCache

        bounds = (threads, blocks) if blocks else threads
        made = cuda.jit(launch_bounds=bounds)(function)
        with contextlib.suppress(RuntimeError):  # there is no folder to keep it in
            made._cache = KernelCache(function, bounds)
        return made

    return decorate


class SharedMemoryError(ValueError):
    """The tiles of a kernel do not fit in the shared memory of a block."""


if SIMULATED:
    _adding = threading.Lock()

    def load(A: Any, i: Any, j: Any) -> Any:
        """A[i, j] from L2: it does not enter L1, so an element costs what the model says."""
        return A[i, j]

    def in_fours(A: Any) -> bool:
        """Whether rows of a float32 matrix start at multiples of 16 bytes, for load_four."""
        return bool(A.shape[1] % 4 == 0)

    def load_four(A: Any, i: Any, j: Any) -> Any:
        """A[i, j : j + 4] of float32 in one instruction, from L2; j is a multiple of 4."""
        return A[i, j], A[i, j + 1], A[i, j + 2], A[i, j + 3]

    def store_four(A: Any, i: Any, j: Any, four: Any) -> None:
        """A[i, j : j + 4] = four, in one instruction; j is a multiple of 4."""
        for u in range(4):
            A[i, j + u] = four[u]

    def add(A: Any, i: Any, j: Any, x: Any) -> None:
        """A[i, j] += x, whoever else adds to it at the same time; in which order is left open."""
        with _adding:
            A[i, j] += x

    def syncwarp() -> None:
        """What comes before it, a thread has begun before what comes after it."""

    def load4(sm: Any, i: Any) -> Any:
        """Four consecutive floats of shared memory; i is a multiple of 4."""
        return sm[i], sm[i + 1], sm[i + 2], sm[i + 3]

    def store4(sm: Any, i: Any, a: Any, b: Any, c: Any, d: Any) -> None:
        """Four consecutive floats of shared memory become these; i is a multiple of 4."""
        sm[i], sm[i + 1], sm[i + 2], sm[i + 3] = a, b, c, d

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
    from numba.cuda import cgutils, libdevice
    from numba.cuda.extending import intrinsic

    _FOUR, _I32, _I64 = ir.VectorType(ir.FloatType(), 4), ir.IntType(32), ir.IntType(64)

    def _in_shared(context, builder, array_type, array, i):
        data = context.make_array(array_type)(context, builder, array).data
        return builder.bitcast(builder.gep(data, [i]), _FOUR.as_pointer())

    def _in_global(context, builder, array_type, array, i, j):
        """The address of element (i, j), as an integer."""
        array = context.make_array(array_type)(context, builder, array)
        address = builder.ptrtoint(array.data, _I64)
        for index, stride in zip((i, j), cgutils.unpack_tuple(builder, array.strides), strict=True):
            address = builder.add(address, builder.mul(builder.zext(index, _I64), stride))
        return address

    def _from_l2(builder, result, instruction, constraints, address):
        """A load that does not enter L1, as Numba's `ldcg`, but kept in order with stores."""
        function = ir.FunctionType(result, [_I64])
        load = ir.InlineAsm(function, instruction, constraints + ",l", side_effect=True)
        return builder.call(load, [address])

    def _vector(builder, values):
        x = ir.Constant(_FOUR, ir.Undefined)
        for n, value in enumerate(values):
            x = builder.insert_element(x, value, ir.Constant(_I32, n))
        return x

    @intrinsic
    def in_fours(typingctx, A):
        """Whether rows of a float32 matrix start at multiples of 16 bytes, for load_four."""

        def generate(context, builder, sig, args):
            array = context.make_array(sig.args[0])(context, builder, args[0])
            row, column = cgutils.unpack_tuple(builder, array.strides)
            low = builder.or_(builder.ptrtoint(array.data, _I64), row)
            aligned = builder.icmp_unsigned(
                "==", builder.and_(low, ir.Constant(_I64, 15)), ir.Constant(_I64, 0)
            )
            return builder.and_(aligned, builder.icmp_unsigned("==", column, ir.Constant(_I64, 4)))

        return types.boolean(A), generate

    @intrinsic
    def load(typingctx, A, i, j):
        """A[i, j] from L2: it does not enter L1, so an element costs what the model says."""

        def generate(context, builder, sig, args):
            bits = A.dtype.bitwidth
            kind, register = {8: ("u8", "h"), 16: ("u16", "h"), 32: ("f32", "f")}[bits]
            wide = ir.FloatType() if bits == 32 else ir.IntType(16)
            address = _in_global(context, builder, sig.args[0], *args)
            x = _from_l2(builder, wide, f"ld.global.cg.{kind} $0, [$1];", f"={register}", address)
            return builder.trunc(x, ir.IntType(8)) if bits == 8 else x

        return A.dtype(A, types.uint32, types.uint32), generate

    @intrinsic
    def load_four(typingctx, A, i, j):
        """A[i, j : j + 4] of float32 in one instruction, from L2; j is a multiple of 4."""

        def generate(context, builder, sig, args):
            address = _in_global(context, builder, sig.args[0], *args)
            floats = ir.LiteralStructType([ir.FloatType()] * 4)
            instruction = "ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];"
            x = _from_l2(builder, floats, instruction, "=f,=f,=f,=f", address)
            parts = [builder.extract_value(x, n) for n in range(4)]
            return context.make_tuple(builder, sig.return_type, parts)

        return types.UniTuple(types.float32, 4)(A, types.uint32, types.uint32), generate

    @intrinsic
    def store_four(typingctx, A, i, j, four):
        """A[i, j : j + 4] = four, in one instruction; j is a multiple of 4."""

        def generate(context, builder, sig, args):
            address = builder.inttoptr(
                _in_global(context, builder, sig.args[0], *args[:3]), _FOUR.as_pointer(1)
            )
            builder.store(_vector(builder, cgutils.unpack_tuple(builder, args[3])), address, 16)

        return types.void(A, types.uint32, types.uint32, four), generate

    @device
    def add(A, i, j, x):
        """A[i, j] += x, whoever else adds to it at the same time; in which order is left open."""
        cuda.atomic.add(A, (i, j), x)

    @device
    def syncwarp():
        """What comes before it, a thread has begun before what comes after it."""
        cuda.syncwarp()

    @intrinsic
    def load4(typingctx, sm, i):
        """Four consecutive floats of shared memory in one instruction; i is a multiple of 4."""

        def generate(context, builder, sig, args):
            x = builder.load(_in_shared(context, builder, sig.args[0], *args), align=16)
            parts = [builder.extract_element(x, ir.Constant(_I32, n)) for n in range(4)]
            return context.make_tuple(builder, sig.return_type, parts)

        return types.UniTuple(types.float32, 4)(sm, i), generate

    @intrinsic
    def store4(typingctx, sm, i, a, b, c, d):
        """Four consecutive floats of shared memory become these; i is a multiple of 4."""

        def generate(context, builder, sig, args):
            address = _in_shared(context, builder, sig.args[0], *args[:2])
            builder.store(_vector(builder, args[2:]), address, 16)

        f = types.float32
        return types.void(sm, i, f, f, f, f), generate

    exp2, log = libdevice.exp2f, libdevice.logf
    _half, _half_bits = libdevice.half2float, libdevice.float2half_rn

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


def compute_capability() -> tuple[int, int]:
    """Of the current GPU; the simulator has what any kernel asks for."""
    if SIMULATED:
        return 9, 0
    major, minor = cuda.get_current_device().compute_capability
    return int(major), int(minor)


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
def _allow(function: Any, signature: Any, context: int) -> None:
    """Let a compiled kernel have all shared memory that a block may, not the 48 KB it has unasked.

    Once for every launch: what a smaller one asked for would be too little for a larger one.
    """
    from numba.cuda.cudadrv import driver
    from numba.cuda.cudadrv.driver import binding

    loaded = function.overloads[signature]._codelibrary.get_cufunc()
    attribute = binding.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    most = shared_memory_bytes()
    driver.driver.cuKernelSetAttribute(attribute, most, loaded.handle, loaded.device.id)


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
        _allow(function, signature, cuda.current_context().device.id)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumbaPerformanceWarning)  # small grids are fine
        function[grid, threads, cuda.external_stream(stream) if stream else 0, shared_bytes](*args)


@cache
def _ltoir(function: Any, signature: Any) -> bytes:
    """What is linked, for compute capability 8.0, and by later ones with the same result."""
    bounds, cc = function.targetoptions["launch_bounds"], (8, 0)
    helpers_are_for = mock.Mock(return_value=mock.Mock(compute_capability=cc))
    with mock.patch("numba.cuda.dispatcher.get_current_device", helpers_are_for):
        code, _ = cuda.compile(
            function.py_func, types.void(*signature), device=False, abi="numba", output="ltoir",
            cc=cc, launch_bounds=bounds,
        )  # fmt: skip
    return bytes(code)


def linked(function: Any, signature: Any, arch: str) -> dict[str, int]:
    """Compile and assemble a kernel without a GPU: what the assembler says of it.

    By link-time optimisation, as a launch does: an assembler that is given PTX orders loads another
    way, which takes other registers, and does not follow `setmaxnreg`.

    Parameters
    ----------
    function : kernel
    signature : tuple of Numba types
    arch : str
        "sm_80", "sm_90a", ...

    Returns
    -------
    dict
        registers (a thread), spill_bytes, stack_bytes (local memory), wide_floats, the instructions
        on float64 (a Python literal that widens what should be float32), and warnings: how often it
        says that it did not do as it was told, as when it waits for each `wgmma` before the next.
    """
    import re

    from cuda.core import Linker, LinkerOptions, ObjectCode

    code = _ltoir(function, signature)
    made: dict[str, Any] = {}
    for kind in ("ptx", "cubin"):
        options = LinkerOptions(
            arch=arch,
            link_time_optimization=True,
            ptx=True if kind == "ptx" else None,
            ptxas_options=None if kind == "ptx" else ["-v"],
        )
        linker = Linker(ObjectCode.from_ltoir(code), options=options)
        made[kind], log = linker.link(kind).code, linker.get_info_log()
    ptx = made["ptx"].decode()

    def number(pattern: str) -> int:
        return sum(map(int, re.findall(pattern, log)))

    return {
        "registers": number(r"Used (\d+) registers"),
        "spill_bytes": number(r"(\d+) bytes spill"),
        "stack_bytes": number(r"(\d+) bytes stack"),
        "wide_floats": len(re.findall(r"\.f64", ptx)),
        "warnings": log.count("Potential Performance Loss"),
    }
