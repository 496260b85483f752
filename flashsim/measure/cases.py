"""What is measured: a kernel, or its loads and stores alone, on one problem with given tiles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

from ..algorithms import SHAPES
from ..cost.counts import Cost
from ..cost.io import io_cost
from ..layouts import local_global

Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class Step:
    """What one launch does of a call.

    Of the arrays in `reads` and `writes` it moves what the closed form of the call says, less what
    other launches move once; of those in `reads_once` and `writes_once` each element, once. flops,
    exps: its share.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    reads_once: tuple[str, ...] = ()
    writes_once: tuple[str, ...] = ()
    flops: Fraction = Fraction(0)
    exps: Fraction = Fraction(0)


def _step(reads: str, writes: str, flops: Any = 0, exps: Any = 0, **once: str) -> Step:
    split = {name: tuple(arrays.split()) for name, arrays in once.items()}
    return Step(
        tuple(reads.split()), tuple(writes.split()), **split,
        flops=Fraction(flops), exps=Fraction(exps),
    )  # fmt: skip


_FLASH1 = {"flash1": _step("Q K V O l m", "O l m", 1, 1)}
_FLASH1_BACKWARD = {"flash1_backward": _step("Q K V O l m dO dQ", "dQ dK dV", 1, 1)}

# The launches of a call, by algorithm and whether it is the backward pass. Launches that convert,
# and the logsumexp of standard attention, are in no closed form.
STEPS: Mapping[tuple[str, bool], Mapping[str, Step]] = {
    ("standard", False): {
        "scores": _step("Q K", "S", "1/2"),
        "softmax": _step("S", "P", 0, 1),
        "values": _step("P V", "O", "1/2"),
    },
    ("flash1", False): _FLASH1,
    ("flash2", False): {"flash2": _step("Q K V", "O L", 1, 1)},
    ("block_sparse", False): _FLASH1,
    ("split_kv", False): {
        "split": _step("Q K V", "O_parts L_parts", 1, 1),
        "merge": _step("O_parts L_parts", "O L"),
    },
    ("flash1", True): _FLASH1_BACKWARD,
    # What dQ has in HBM is read where it is added up, in the L2: it enters no multiprocessor.
    ("flash2", True): {
        "zeros": _step("", "", writes_once="dQ"),
        "D": _step("O", "D", reads_once="dO"),
        "flash2_backward": _step("Q K V L D dO", "dQ dK dV", 1, 1),
    },
    ("flash2-two-kernel", True): {
        "D": _step("O", "D", reads_once="dO"),
        "dKdV": _step("Q dO L D", "dK dV", "4/7", "1/2", reads_once="K V"),
        "dQ": _step("K V", "dQ", "3/7", "1/2", reads_once="Q dO L D"),
    },
    ("block_sparse", True): _FLASH1_BACKWARD,
}

WIDE: tuple[Shape, ...] = ((4, 16, 4096, 64), (2, 16, 4096, 128))
LONG: Shape = (1, 2, 131072, 128)  # K and V of a head exceed the L2
DECODING: Shape = (4, 16, 32768, 64)
# Tiles over which the traffic falls by eight: of flash1 with Bc, of the others with Br. At d = 128
# flash1's backward kernel spills, which shows where a layout leaves it few tiles: not measured.
USUAL_TILES = {
    ("standard", False, 64): ((128, 64),),
    ("standard", False, 128): ((128, 64),),
    ("flash1", False, 64): ((64, 16), (64, 32), (64, 64), (64, 128)),
    ("flash1", False, 128): ((32, 16), (32, 32), (32, 64), (32, 128)),
    ("flash2", False, 64): ((16, 64), (32, 64), (64, 64), (128, 64)),
    ("flash2", False, 128): ((16, 64), (32, 64), (64, 64), (128, 64)),
    ("block_sparse", False, 64): ((64, 64),),
    ("block_sparse", False, 128): ((64, 64),),
    ("flash1", True, 64): ((64, 64),),
    ("flash1", True, 128): ((64, 64),),
    ("flash2", True, 64): ((32, 32), (64, 64)),
    ("flash2", True, 128): ((32, 32), (64, 64)),
    ("flash2-two-kernel", True, 64): ((32, 32), (64, 64)),
    ("flash2-two-kernel", True, 128): ((32, 32), (64, 64)),
    ("block_sparse", True, 64): ((64, 64),),
}


def _shape(name: str) -> tuple[str, ...]:
    return SHAPES[name.removesuffix("_parts")]


@dataclass(frozen=True)
class Case:
    """A kernel on a problem.

    algorithm: a name in `flashsim.ALGORITHMS`, or "split_kv"; block_sparse keeps the diagonal, the
    blocks beside it, the first row and the first column. shape: (batch, heads, N, d), with N keys
    and as many queries unless `queries` says otherwise. loads_only: without its arithmetic, for
    what is in `LOAD_ONLY`.
    """

    algorithm: str
    shape: Shape
    tiles: tuple[int, int]
    backward: bool = False
    loads_only: bool = False
    dtype: str = "float32"
    queries: int | None = None

    @property
    def label(self) -> str:
        """A name for people."""
        kind = " backward" if self.backward else ""
        kind += " loads only," if self.loads_only else ""
        return f"{self.algorithm}{kind} {self.tiles[0]} x {self.tiles[1]}"

    @property
    def steps(self) -> Mapping[str, Step]:
        """The launches that the closed form covers, in order."""
        return STEPS[self.algorithm, self.backward]

    @property
    def Nq(self) -> int:
        """Queries."""
        return self.shape[2] if self.queries is None else self.queries

    @property
    def rules(self) -> dict[str, Any]:
        """What `attention` and `io_cost` are told beyond sizes and tiles."""
        if self.algorithm != "block_sparse":
            return {}
        Tr, Tc = (
            -(-n // side) for n, side in zip((self.Nq, self.shape[2]), self.tiles, strict=True)
        )
        return {"block_mask": local_global((Tr, Tc))}

    def whole_cost(self, parts: int = 1) -> Cost:
        """What the call must move and compute; parts: in how many split_kv walks the keys."""
        batch, heads, N, d = self.shape
        split = self.algorithm == "split_kv"
        cost = io_cost(
            "flash2" if split else self.algorithm, N=self.Nq, Nk=N, d=d, Br=self.tiles[0],
            Bc=self.tiles[1], heads=heads, batch=batch, dtype=self.dtype, backward=self.backward,
            **self.rules,
        )  # fmt: skip
        if not split:
            return cost
        partial = {f"{name}_parts": parts * n for name, n in cost.writes.items()}
        return replace(
            cost,
            reads=cost.reads | {"Q": parts * cost.reads["Q"]} | partial,
            writes=cost.writes | partial,
            item_bytes=cost.item_bytes | dict.fromkeys(partial, cost.item_bytes["L"]),
        )

    def cost(self, step: str, parts: int = 1) -> Cost:
        """What one launch must move and compute."""
        whole, mine = self.whole_cost(parts), self.steps[step]
        others = [other for name, other in self.steps.items() if name != step]
        reads = {
            n: whole.reads[n] - self._once(n, [o.reads_once for o in others]) for n in mine.reads
        }
        writes = {
            n: whole.writes[n] - self._once(n, [o.writes_once for o in others]) for n in mine.writes
        }
        computed = 0 if self.loads_only else 1
        return Cost(
            reads=reads | {n: self._size(n) for n in mine.reads_once},
            writes=writes | {n: self._size(n) for n in mine.writes_once},
            item_bytes=whole.item_bytes,
            flops=int(computed * mine.flops * whole.flops),
            exps=int(computed * mine.exps * whole.exps),
        )

    def sector_bytes(self, step: str, parts: int = 1) -> tuple[float, float]:
        """Bytes that enter and leave the multiprocessors: a sector of 32 bytes moves whole.

        So a vector of fewer than eight queries takes as much as one of eight.
        """
        cost = self.cost(step, parts)

        def moved(side: dict[str, int]) -> float:
            return sum(
                n * cost.item_bytes[name]
                * (max(1, 32 / (4 * self.Nq)) if len(_shape(name)) == 1 else 1)
                for name, n in side.items()
            )  # fmt: skip

        return moved(cost.reads), moved(cost.writes)

    def _size(self, name: str) -> int:
        batch, heads, N, d = self.shape
        sizes = {"Nq": self.Nq, "Nk": N, "d": d, "dv": d}
        return batch * heads * math.prod(sizes[symbol] for symbol in _shape(name))

    def _once(self, name: str, others: list[tuple[str, ...]]) -> int:
        """Elements of an array that other launches move once."""
        return self._size(name) * sum(name in arrays for arrays in others)

    def plan(self, q: Any, k: Any, v: Any, do: Any) -> Any:
        """The launches, checked and allocated, without what the closed form does not cover."""
        from .. import kernels
        from ..kernels import load_only

        what = {"algorithm": self.algorithm, "tiles": self.tiles, **self.rules}
        if self.backward:
            forward = {**what, "algorithm": "block_sparse" if self.rules else "flash2"}
            if not self.rules:
                del forward["tiles"]
            out = kernels.attention(q, k, v, **forward)
            made = kernels.plan_backward(q, k, v, out.output, out.lse, do, **what)
        else:
            made = (load_only.plan if self.loads_only else kernels.plan)(q, k, v, **what)
        steps = [step for step in made.steps if step.name.removeprefix("load-only ") in self.steps]
        return replace(made, steps=steps)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` undoes it."""
        return asdict(self)


def from_dict(x: dict[str, Any]) -> Case:
    """The case that `as_dict` wrote; further entries are left alone."""
    batch, heads, N, d = x["shape"]
    Br, Bc = x["tiles"]
    return Case(
        x["algorithm"], (batch, heads, N, d), (Br, Bc), x["backward"], x["loads_only"], x["dtype"],
        x["queries"],
    )  # fmt: skip


LOAD_ONLY = ("flash1", "flash2")


def usual(shapes: tuple[Shape, ...] | None = None, dtype: str = "float32") -> list[Case]:
    """Every kernel over its usual tiles; the forward flash kernels without arithmetic too.

    Without shapes those of `WIDE`, flash2 on `LONG`, and one query a head against `DECODING`.
    """
    cases = []
    for shape in WIDE if shapes is None else shapes:
        width = 64 if shape[3] <= 64 else 128
        for algorithm, backward in STEPS:
            for tiles in USUAL_TILES.get((algorithm, backward, width), ()):
                case = Case(algorithm, shape, tiles, backward, dtype=dtype)
                if algorithm in LOAD_ONLY and not backward:
                    cases.append(replace(case, loads_only=True))
                cases.append(case)
    if shapes is None:
        cases.append(Case("flash2", LONG, (128, 64), dtype=dtype))
        cases += [Case("split_kv", DECODING, (1, Bc), dtype=dtype, queries=1) for Bc in (32, 64)]
        one = Case("flash2", DECODING, (16, 64), dtype=dtype, queries=1)
        cases += [replace(one, loads_only=True), one]
    return cases
