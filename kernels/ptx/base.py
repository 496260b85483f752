"""How an instruction of PTX becomes a function: compiled from its text, or emulated in Python.

    @instruction("cvt.rn.f16x2.f32 {y}, {high}, {low};", y=Result(u32), high=f32, low=f32)
    def pack(high, low):
        \"\"\"What it does.\"\"\"
        return ...  # the same in Python: this runs in Numba's simulator

A kernel calls `pack(high, low)`. Compiled, that is the text, with a register for each name in
braces, or a vector of them; in the simulator it is the body. An array of registers is a whole local
array and where in it to begin: the compiler keeps it in registers if the place is a constant, as it
is in a loop of constant length.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..gpu import SIMULATED, types

__all__ = [
    "Global", "Reads", "Result", "Shared", "Start", "Updates", "Writes", "f32", "instruction",
    "u32", "u64",
]  # fmt: skip

f32, u32, u64 = types.float32, types.uint32, types.uint64


@dataclass(frozen=True)
class Result:
    """What the function returns: a register. It is no argument."""

    type: Any


@dataclass(frozen=True)
class Reads:
    """`count` registers that are read: two arguments, a local array and the index of the first."""

    type: Any
    count: int


@dataclass(frozen=True)
class Writes(Reads):
    """`count` registers that are written: arguments as of `Reads`."""


@dataclass(frozen=True)
class Updates(Reads):
    """`count` registers that are read and written: arguments as of `Reads`."""


@dataclass(frozen=True)
class Shared:
    """An address in shared memory: two arguments, an array there and the index of an element."""


@dataclass(frozen=True)
class Global:
    """An address in global memory: three arguments, a matrix there, a row and a column."""


@dataclass(frozen=True)
class Start:
    """The address of the first element of an array in global memory: one argument, the array."""


def instruction(text: str, *, pure: bool = False, **operands: Any) -> Callable[[Any], Any]:
    """The decorator of a function that is one instruction (or a few) of PTX.

    Parameters
    ----------
    text : str
        PTX, with the operands by name in braces; other braces are PTX's own.
    pure : bool
        Whether it only computes its results, so that the compiler may move it or leave it out.
        Otherwise it stays where it is, and memory is up to date around it.
    **operands
        What each name is, in the order of the function's arguments: a Numba type for a register,
        or one of the classes above.
    """

    def decorate(emulated: Any) -> Any:
        return emulated if SIMULATED else _compiled(emulated, text, pure, operands)

    return decorate


def _compiled(emulated: Any, text: str, pure: bool, operands: dict[str, Any]) -> Any:
    """The intrinsic; its operands in assembly are numbered: what is written, then what is read."""
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    words = {f32: (ir.FloatType(), "f"), u32: (ir.IntType(32), "r"), u64: (ir.IntType(64), "l")}
    written = {n: x for n, x in operands.items() if isinstance(x, (Result, Writes, Updates))}
    numbers: dict[str, list[int]] = {}
    outs: list[Any] = []
    ins: list[Any] = []
    constraints: list[str] = []
    for name, x in written.items():
        numbers[name] = [len(outs) + n for n in range(getattr(x, "count", 1))]
        outs += [words[x.type][0]] * len(numbers[name])
        constraints += ["=" + words[x.type][1]] * len(numbers[name])
    for name, x in operands.items():
        if isinstance(x, Updates):
            constraints += [str(n) for n in numbers[name]]  # in the register that it leaves in
            ins += [words[x.type][0]] * x.count
        elif name not in written:
            kind = {Shared: u32, Global: u64, Start: u64}.get(type(x)) or getattr(x, "type", x)
            count = getattr(x, "count", 1)
            numbers[name] = [len(outs) + len(ins) + n for n in range(count)]
            constraints += [words[kind][1]] * count
            ins += [words[kind][0]] * count
    for name, registers in numbers.items():
        vector = ", ".join(f"${n}" for n in registers)
        is_array = isinstance(operands[name], Reads)
        text = text.replace(f"{{{name}}}", f"{{{vector}}}" if is_array else vector)
    constraints += [] if pure else ["~{memory}"]
    result = ir.LiteralStructType(outs) if len(outs) > 1 else outs[0] if outs else ir.VoidType()
    returned = [x.type for x in operands.values() if isinstance(x, Result)]
    assembly = ir.InlineAsm(
        ir.FunctionType(result, ins), text, ",".join(constraints), side_effect=not pure
    )

    def typed(typingctx: Any, *args: Any) -> Any:
        mine = iter(args)
        wanted: list[Any] = []
        for x in operands.values():
            if isinstance(x, (Reads, Shared)):
                wanted += [next(mine), u32]
                next(mine)
            elif isinstance(x, Global):
                wanted += [next(mine), types.int64, types.int64]
                next(mine), next(mine)
            elif isinstance(x, Start):
                wanted.append(next(mine))
            elif not isinstance(x, Result):
                wanted.append(x)
                next(mine)
        sig = (returned[0] if returned else types.void)(*wanted)

        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            values, places = [], []
            mine = iter(zip(sig.args, args, strict=True))
            for x in operands.values():
                if isinstance(x, Reads):
                    first = _element(context, builder, next(mine), next(mine))
                    each = [
                        builder.gep(first, [ir.Constant(ir.IntType(32), n)]) for n in range(x.count)
                    ]
                    if isinstance(x, (Writes, Updates)):
                        places += each
                    if not isinstance(x, Writes):
                        values += [builder.load(place) for place in each]
                elif isinstance(x, Shared):
                    values.append(_shared_address(context, builder, next(mine), next(mine)))
                elif isinstance(x, Global):
                    values.append(
                        _global_address(context, builder, next(mine), next(mine), next(mine))
                    )
                elif isinstance(x, Start):
                    kind, array = next(mine)
                    data = context.make_array(kind)(context, builder, array).data
                    values.append(builder.ptrtoint(data, ir.IntType(64)))
                elif not isinstance(x, Result):
                    values.append(next(mine)[1])
            found = builder.call(assembly, values)
            parts = [found] if len(outs) == 1 else [
                builder.extract_value(found, n) for n in range(len(outs))
            ]  # fmt: skip
            answer = parts.pop(0) if returned else context.get_dummy_value()
            for part, place in zip(parts, places, strict=True):
                builder.store(part, place)
            return answer

        return sig, generate

    names = [inspect.Parameter("typingctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    names += inspect.signature(emulated).parameters.values()
    functools.update_wrapper(typed, emulated)
    typed.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    return intrinsic(typed)


def _element(context: Any, builder: Any, array: Any, index: Any) -> Any:
    """Where an element of an array of one dimension lies."""
    data = context.make_array(array[0])(context, builder, array[1]).data
    return builder.gep(data, [index[1]])


def _shared_address(context: Any, builder: Any, array: Any, index: Any) -> Any:
    """Where an element of an array lies in the window of shared memory, as 32 bits."""
    from llvmlite import ir

    data = context.make_array(array[0])(context, builder, array[1]).data
    there = builder.addrspacecast(data, ir.PointerType(data.type.pointee, addrspace=3))
    size = ir.Constant(ir.IntType(32), array[0].dtype.bitwidth // 8)
    return builder.add(builder.ptrtoint(there, ir.IntType(32)), builder.mul(index[1], size))


def _global_address(context: Any, builder: Any, matrix: Any, row: Any, column: Any) -> Any:
    """Where an element of a matrix lies, as an integer."""
    from llvmlite import ir
    from numba.cuda import cgutils

    wide = ir.IntType(64)
    array = context.make_array(matrix[0])(context, builder, matrix[1])
    address = builder.ptrtoint(array.data, wide)
    strides = cgutils.unpack_tuple(builder, array.strides)
    for index, stride in zip((row[1], column[1]), strides, strict=True):
        address = builder.add(address, builder.mul(index, stride))
    return address
