"""Compile and assemble every kernel without a GPU, and say how many registers it takes.

python -m flashsim.kernels.assembly          # the table in kernels/README.md
"""

from __future__ import annotations

import dataclasses
from typing import Any

from . import flash1, flash2, flash2_backward, gpu, launch, masks, split_kv, standard
from .gpu import types
from .tiles import Tile, tile_for

ROOM = 227 * 1024  # bytes of shared memory a block may have on compute capability 9.0
NAMES = ("flash2", "flash1", "scores", "softmax", "values", "split", "merge", "D", "dKdV", "dQ")


def kernel_and_types(name: str, d: int, f: masks.Features) -> tuple[Any, Any, Tile]:
    """A kernel with its default tile, and the Numba types of contiguous arguments."""
    stored = types.float32 if f.dtype == "float32" else types.uint16
    A, F = (types.Array(t, 4, "C") for t in (stored, types.float32))
    L, R = types.Array(types.float32, 3, "C"), masks.rule_types(f)
    algorithm = {"scores": "standard", "values": "standard", "split": "split_kv"}.get(name, name)
    if name in ("D", "dKdV", "dQ"):
        algorithm = "flash2_backward"
    elif name in ("softmax", "merge"):
        algorithm = "standard"
    results = 2 if algorithm == "flash2_backward" else 1
    tile = tile_for(*launch.default_tiles(algorithm, d, ROOM), d, results=results)
    rows = gpu.ROW_THREADS
    if name == "flash2":
        return flash2.flash_attention_2(tile, f), (A, A, A, A, L, types.int64, *R), tile
    if name == "flash1":
        return flash1.flash_attention_1(tile, f), (A, A, A, F, L, L, *R), tile
    if name == "scores":
        return standard.scores(tile, f), (A, A, F, *R), tile
    if name == "softmax":
        return standard.softmax(rows, True), (F, F, L), tile
    if name == "values":
        return standard.values(tile, f), (F, A, A, *R), tile
    if name == "split":
        f = dataclasses.replace(f, output="float32")
        return flash2.flash_attention_2(tile, f), (A, A, A, F, L, types.int64, *R), tile
    if name == "merge":
        return split_kv.merge(8, rows, f.dtype), (F, L, A, L), tile
    if name == "D":
        return flash2_backward.row_dots(32, d, rows, f.dtype), (A, A, L), tile
    if name == "dKdV":
        return flash2_backward.keys_and_values(tile, f), (A, A, A, A, L, L, A, A, *R), tile
    return flash2_backward.queries(tile, f), (A, A, A, A, L, L, A, *R), tile


def report(name: str, d: int, arch: str, **features: Any) -> dict[str, int]:
    """Registers, spills and local memory of a kernel on an architecture, by nvJitLink."""
    function, signature, tile = kernel_and_types(name, d, masks.Features(**features))
    one_row = name in ("softmax", "merge", "D")
    threads = gpu.ROW_THREADS if one_row else tile.threads
    return {"threads": threads, **gpu.compiled(function, signature, arch)}


if __name__ == "__main__":
    for width in (64, 128, 256):
        for kernel_name in NAMES:
            for architecture in ("sm_80", "sm_90a"):
                print(width, kernel_name, architecture, report(kernel_name, width, architecture))
