"""Compile and assemble every kernel without a GPU, and say how many registers it takes.

python -m flashsim.kernels.assembly          # the table in kernels/README.md
"""

from __future__ import annotations

import dataclasses
from typing import Any

from . import (
    ampere,
    ampere_backward,
    flash1,
    flash1_backward,
    flash2,
    flash2_backward,
    flash2_two_kernels,
    fp8,
    gpu,
    gradients,
    hopper,
    hopper_backward,
    launch,
    load_only,
    masks,
    padding,
    split_kv,
    standard,
)
from .gpu import types
from .warpgroup_tiles import WARPGROUP, WarpgroupTile, fp8_tile_for

ROOM = 227 * 1024  # bytes of shared memory a block may have on compute capability 9.0
# Of each kernel, the row of the registry whose default tiles it takes.
FORWARD = {
    "flash2": "flash2",
    "flash1": "flash1",
    "scores": "standard",
    "softmax": "standard",
    "values": "standard",
    "split": "split_kv",
    "merge": "split_kv",
    "load_only flash2": "flash2",
    "load_only flash1": "flash1",
    "ampere": "ampere",
    "keys": "hopper",
}
BACKWARD = {
    "zeros": "flash2",
    "round": "flash2",
    "D": "flash2",
    "flash2_backward": "flash2",
    "dKdV": "flash2-two-kernel",
    "dQ": "flash2-two-kernel",
    "flash1_backward": "flash1",
    "ampere_backward": "ampere",
    "statistics": "hopper",
    "finish": "hopper",
}
NAMES = (*FORWARD, *BACKWARD)
TENSOR_CORES = ("ampere", "ampere_backward", "statistics", "finish")  # and what goes with them
BY_ROWS = ("softmax", "merge", "D", "zeros", "round", "keys", "statistics")  # without a tile


def kernel_and_types(name: str, d: int, f: masks.Features) -> tuple[Any, Any, Any]:
    """A kernel with its default tile, and the Numba types of contiguous arguments.

    Those for tensor cores take 16-bit numbers: float16, unless f says bfloat16.
    """
    if name in TENSOR_CORES and f.dtype == "float32":
        f = dataclasses.replace(f, dtype="float16")
    stored = types.float32 if f.dtype == "float32" else types.uint16
    A, F = (types.Array(t, 4, "C") for t in (stored, types.float32))
    L, M = (types.Array(types.float32, n, "C") for n in (3, 2))
    R, i = masks.rule_types(f), types.int64
    keys, rank, walked = (
        types.Array(t, n, "C") for t, n in ((types.uint8, 2), (types.int32, 2), (types.int32, 3))
    )
    back = name in BACKWARD
    row = launch.BACKWARD[BACKWARD[name]] if back else launch.KERNELS[FORWARD[name]]
    tile = row.tile(*launch.default_tiles(row, d, ROOM, f=f), d, results=row.results)
    rows, partial = gpu.ROW_THREADS, dataclasses.replace(f, output="float32")
    make, signature = {
        "flash2": (lambda: flash2.flash_attention_2(tile, f), (A, A, A, A, L, i, *R)),
        "flash1": (lambda: flash1.flash_attention_1(tile, f), (A, A, A, F, L, L, *R)),
        "scores": (lambda: standard.scores(tile, f), (A, A, F, *R)),
        "softmax": (lambda: standard.softmax(rows, 4), (F, F, L)),
        "values": (lambda: standard.values(tile, f), (F, A, A, *R)),
        "split": (lambda: flash2.flash_attention_2(tile, partial), (A, A, A, F, L, i, *R)),
        "merge": (lambda: split_kv.merge(8, d, rows, f.dtype), (F, L, A, L)),
        "load_only flash2": (lambda: load_only.load_only_2(tile, f), (A, A, A, A, L, i, *R)),
        "ampere": (lambda: ampere.flash_attention_2(tile, f), (A, A, A, A, L, *R)),
        "ampere_backward": (
            lambda: ampere_backward.flash_attention_2_backward(tile, f),
            (A, A, A, A, L, L, F, A, A, *R),
        ),
        "load_only flash1": (lambda: load_only.load_only_1(tile, f), (A, A, A, F, L, L, *R)),
        "keys": (lambda: padding.walked_tiles(tile.Bc, rows), (keys, rank, walked)),
        "zeros": (lambda: gradients.zeros(launch.ROWS, d, rows), (F,)),
        "round": (lambda: gradients.rounded(launch.ROWS, d, f.dtype, rows), (F, A)),
        "statistics": (lambda: hopper_backward.row_statistics(d, rows, f.dtype), (A, A, L, M, M)),
        "finish": (lambda: hopper_backward.finish(tile, f.dtype), (M, A, types.float32)),
        "D": (lambda: flash2_backward.row_dots(launch.ROWS, d, rows, f.dtype), (A, A, L)),
        "flash2_backward": (
            lambda: flash2_backward.flash_attention_2_backward(tile.swapped, f),
            (A, A, A, A, L, L, F, A, A, *R),
        ),
        "dKdV": (
            lambda: flash2_two_kernels.keys_and_values(tile.swapped, f),
            (A, A, A, A, L, L, A, A, *R),
        ),
        "dQ": (lambda: flash2_two_kernels.queries(tile, f), (A, A, A, A, L, L, A, *R)),
        "flash1_backward": (
            lambda: flash1_backward.flash_attention_1_backward(tile.swapped, f),
            (A, A, A, A, L, L, A, F, A, A, *R),
        ),
    }[name]
    return make(), signature, tile


def report(name: str, d: int, arch: str, **features: Any) -> dict[str, int]:
    """Registers, spills and local memory of a kernel on an architecture, by nvJitLink."""
    function, signature, tile = kernel_and_types(name, d, masks.Features(**features))
    own = WARPGROUP if name == "finish" else tile.threads
    threads = gpu.ROW_THREADS if name in BY_ROWS else own
    return {"threads": threads, **gpu.linked(function, signature, arch)}


def hopper_report(
    Br: int, Bc: int, d: int, ping_pong: bool = False, **features: Any
) -> dict[str, int]:
    """The same, and warnings, of the kernel for warpgroups on sm_90a; see gpu.linked."""
    f = masks.Features(**features)
    tile = WarpgroupTile(Br, Bc, d, ping_pong=ping_pong)
    if f.fp8:
        tile = fp8_tile_for(Br, Bc, d)
    function = hopper.flash_attention_3(tile, f)
    return {"threads": tile.threads, **gpu.linked(function, hopper.signature(f), "sm_90a")}


def fp8_report(rotated: bool, transposed: bool, **features: Any) -> dict[str, int]:
    """The same of what brings Q, K (rotated or not) and V (transposed) into e4m3."""
    words, scales = types.Array(types.uint16, 4, "C"), types.Array(types.float32, 3, "C")
    signature = (words, words, scales, types.Array(types.float32, 1, "C"))
    function = fp8.quantised(128, masks.Features(**features).dtype, rotated, transposed)
    return {"threads": fp8.THREADS, **gpu.linked(function, signature, "sm_90a")}


def hopper_backward_report(Br: int, Bc: int, d: int, **features: Any) -> dict[str, int]:
    """The same of the backward kernel; shared_out: registers of a thread of each warpgroup."""
    tile, f = hopper_backward.BackwardTile(Br, Bc, d), masks.Features(**features)
    function = hopper_backward.flash_attention_3_backward(tile, f)
    said = gpu.linked(function, hopper_backward.signature(f), "sm_90a")
    shared_out = tile.registers[0] + tile.consumers * tile.registers[1]
    return {"threads": tile.threads, "shared_out": shared_out, **said}


if __name__ == "__main__":
    for width in (64, 128, 256):
        for kernel_name in NAMES if width < 256 else [n for n in NAMES if n not in TENSOR_CORES]:
            band = kernel_name in TENSOR_CORES
            for architecture in ("sm_80", "sm_90a"):
                said = report(kernel_name, width, architecture, band=band)
                print(width, kernel_name, architecture, said)
    for sizes in ((192, 128, 64), (128, 128, 128), (128, 112, 192), (128, 80, 256)):
        print(sizes, "hopper", "sm_90a", hopper_report(*sizes, True, dtype="float16", band=True))
    for sizes in ((128, 128, 64), (64, 128, 128)):
        said = hopper_backward_report(*sizes, dtype="float16", band=True)
        print(sizes, "hopper_backward", "sm_90a", said)
