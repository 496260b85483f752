"""What is measured: a kernel, or its loads and stores alone, on one problem with given tiles."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ..cost.counts import Cost
from ..cost.io import io_cost

Shape = tuple[int, int, int, int]

# What each launch reads and writes of the arrays that the closed form names. The logsumexp of
# standard attention is in no closed form.
STEPS: dict[str, dict[str, tuple[str, str]]] = {
    "standard": {"scores": ("QK", "S"), "softmax": ("S", "P"), "values": ("PV", "O")},
    "flash1": {"flash1": ("QKVOlm", "Olm")},
    "flash2": {"flash2": ("QKV", "OL")},
}
USUAL_SHAPES: tuple[Shape, ...] = ((4, 16, 4096, 64), (2, 16, 4096, 128))
# Tiles over which the traffic falls by eight: of flash1 with Bc, of the others with Br.
USUAL_TILES = {
    ("standard", 64): ((128, 64),),
    ("standard", 128): ((128, 64),),
    ("flash1", 64): ((64, 16), (64, 32), (64, 64), (64, 128)),
    ("flash1", 128): ((32, 16), (32, 32), (32, 64), (32, 128)),
    ("flash2", 64): ((16, 64), (32, 64), (64, 64), (128, 64)),
    ("flash2", 128): ((16, 64), (32, 64), (64, 64), (128, 64)),
}


@dataclass(frozen=True)
class Case:
    """A kernel on a problem.

    algorithm: "standard", "flash1" or "flash2"; loads_only: without its arithmetic (not standard).
    """

    algorithm: str
    shape: Shape
    tiles: tuple[int, int]
    loads_only: bool = False
    dtype: str = "float32"

    @property
    def label(self) -> str:
        """A name for people."""
        kind = " loads only," if self.loads_only else ""
        return f"{self.algorithm}{kind} {self.tiles[0]} x {self.tiles[1]}"

    @property
    def steps(self) -> tuple[str, ...]:
        """The launches that the closed form covers, in order."""
        return tuple(STEPS[self.algorithm])

    def cost(self, step: str) -> Cost:
        """What one launch must move and compute."""
        batch, heads, N, d = self.shape
        whole = io_cost(
            self.algorithm, N=N, d=d, Br=self.tiles[0], Bc=self.tiles[1], heads=heads, batch=batch,
            dtype=self.dtype,
        )  # fmt: skip
        reads, writes = STEPS[self.algorithm][step]
        products = 0 if self.loads_only or step == "softmax" else whole.flops
        return Cost(
            reads={name: n for name, n in whole.reads.items() if name in reads},
            writes={name: n for name, n in whole.writes.items() if name in writes},
            item_bytes=whole.item_bytes,
            flops=products // 2 if self.algorithm == "standard" else products,
            exps=0 if self.loads_only or step in ("scores", "values") else whole.exps,
        )

    def plan(self, q: Any, k: Any, v: Any) -> Any:
        """The launches, checked and allocated, without what the closed form does not cover."""
        from .. import kernels
        from ..kernels import load_only

        make = load_only.plan if self.loads_only else kernels.plan
        made = make(q, k, v, algorithm=self.algorithm, tiles=self.tiles)
        return replace(made, steps=[step for step in made.steps if step.name != "finish"])

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` undoes it."""
        return asdict(self)


def from_dict(x: dict[str, Any]) -> Case:
    """The case that `as_dict` wrote; further entries are left alone."""
    batch, heads, N, d = x["shape"]
    Br, Bc = x["tiles"]
    return Case(x["algorithm"], (batch, heads, N, d), (Br, Bc), x["loads_only"], x["dtype"])


def usual(shapes: tuple[Shape, ...] = USUAL_SHAPES, dtype: str = "float32") -> list[Case]:
    """Every algorithm over its usual tiles, and the flash kernels without arithmetic too."""
    cases = []
    for shape in shapes:
        for algorithm in STEPS:
            for tiles in USUAL_TILES[algorithm, 64 if shape[3] <= 64 else 128]:
                for loads_only in (True, False) if algorithm != "standard" else (False,):
                    cases.append(Case(algorithm, shape, tiles, loads_only, dtype))
    return cases
