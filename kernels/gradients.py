"""What the backward kernels share: P and dS of a tile of scores, and the products that they enter.

A tile has keys as rows, so its Br is the paper's Bc, and all is transposed: Sᵀ = K Qᵀ,
dPᵀ = V dOᵀ, dV += Pᵀ dO, dK += dSᵀ Q, and from dS with queries as rows dQ += dS K.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from . import masks, tiles
from .dropout import kept
from .gpu import (
    cuda,
    device,
    exp2,
    float32,
    in_fours,
    int32,
    kernel,
    load,
    narrow,
    store_four,
    uint32,
)
from .masks import Features
from .tiles import Layout, Tile


def arrangement(tile: Tile, output: bool = False) -> dict[str, int]:
    """Where in shared memory the tiles lie: K and V stay, Q and dO (and O) pass.

    `scores` holds P or dS, either way up; L and D are statistics of the queries.
    """
    place = Layout(tile.TX)
    return {
        "Kj": place.place(tile.Br, tile.LD),
        "Vj": place.place(tile.Br, tile.LD),
        "Qi": place.place(tile.Bc, tile.LD),
        "dOi": place.place(tile.Bc, tile.LD),
        **({"Oi": place.place(tile.Bc, tile.LD)} if output else {}),
        "scores": place.place(max(tile.Br * tile.LP, tile.Bc * tile.swapped.LP), 1),
        "Li": place.place(tile.Bc, 1),
        "Di": place.place(tile.Bc, 1),
        "bytes": place.bytes,
    }


@cache
def weights(tile: Tile, f: Features, output: bool = False) -> Any:
    """weights(sm, i0, j0, ..., x, Sji, dSji, ty, tx): P and dS of a tile, in registers, transposed.

    From Q, K, V, dO, L (base 2) and D on chip, and the tile of an array mask in `scores`. A weight
    that is masked is -0.0, and so is its gradient, see tiles.weigh.
    """
    Bk, Bq, RM, RN, TY, TX, LP = tile.Br, tile.Bc, tile.RM, tile.RN, tile.TY, tile.TX, tile.LP
    at = arrangement(tile, output)
    sK, sV, sQ, sdO = at["Kj"], at["Vj"], at["Qi"], at["dOi"]
    sP, sL, sD, RMN = at["scores"], at["Li"], at["Di"], tile.RM * tile.RN
    has_mask, tall, broad, dropout = bool(f.mask), f.tall, f.broad, f.dropout
    product, full, counts = tiles.rows_by_rows(tile), masks.full(Bq, Bk, f), masks.counts(f)

    @device
    def tile_weights(
        sm, i0, j0, Nq, Nk, lo, hi, b, h, keys, scale, seed, threshold, factor,
        x, Sji, dSji, ty, tx,
    ):  # fmt: skip
        for n in range(RMN):
            Sji[n] = float32(0)
            dSji[n] = float32(0)
        product(sm, sK, sQ, x, Sji, ty, tx)  # S = QKᵀ
        product(sm, sV, sdO, x, dSji, ty, tx)  # dP = dO Vᵀ
        partial = not full(i0, j0, Nk, lo, hi) or i0 + Bq > Nq
        for m in range(RM):
            key = ty + m * TY
            for n in range(RN):
                query = tx + n * TX
                s = Sji[m * RN + n] * scale
                live = True
                if partial:
                    live = i0 + query < Nq and counts(i0 + query, j0 + key, Nk, lo, hi, b, keys)
                    if has_mask and live:
                        bias = sm[sP + (query if tall else 0) + (key if broad else 0) * LP]
                        s = s + bias
                        live = bias != -float32(float("inf"))
                p = -float32(0.0)
                ds = -float32(0.0)
                if live:
                    lse = sm[sL + query]
                    dp = dSji[m * RN + n]
                    p = exp2(s - lse) if lse != -float32(float("inf")) else float32(0)
                    z = p
                    if dropout:
                        row, col = i0 + query, j0 + key
                        z = kept(float32(1), seed, threshold, factor, b, h, row, col)
                        dp = dp * z
                        z = p * z
                    ds = p * (dp - sm[sD + query]) + float32(0)  # dS
                    p = z
                Sji[m * RN + n] = p
                dSji[m * RN + n] = ds

    return tile_weights


@cache
def times(tile: Tile, f: Features, output: bool = False) -> Any:
    """times(sm, S, b, bad, x, O, ty, tx): O += S B, for S in registers and B (Bc, d) on chip.

    S goes on chip for that; bad: B holds numbers that are not finite. Ends with a barrier.
    """
    RM, RN, TY, TX, LP = tile.RM, tile.RN, tile.TY, tile.TX, tile.LP
    sS, masked = arrangement(tile, output)["scores"], f.masked
    accumulate, weigh = tiles.rows_by_columns(tile), tiles.weigh(tile)

    @device
    def product(sm, S, b, bad, x, O, ty, tx):
        for m in range(RM):
            for n in range(RN):
                sm[sS + (ty + m * TY) * LP + tx + n * TX] = S[m * RN + n]
        cuda.syncthreads()
        if masked and bad:
            weigh(sm, sS, b, O, ty, tx)
        else:
            accumulate(sm, sS, b, x, O, ty, tx)
        cuda.syncthreads()

    return product


@cache
def transposed_times(tile: Tile, f: Features, output: bool = False) -> Any:
    """transposed_times(sm, S, b, bad, x, O, ty, tx): O += Sᵀ B for B (Br, d), else as `times`.

    O (Bc, d) is shared out over the threads as tile.swapped says.
    """
    RM, RN, TY, TX, LP = tile.RM, tile.RN, tile.TY, tile.TX, tile.swapped.LP
    sS, masked = arrangement(tile, output)["scores"], f.masked
    accumulate, weigh = tiles.rows_by_columns(tile.swapped), tiles.weigh(tile.swapped)

    @device
    def product(sm, S, b, bad, x, O, ty, tx):
        for m in range(RM):
            for n in range(RN):
                sm[sS + (tx + n * TX) * LP + ty + m * TY] = S[m * RN + n]
        cuda.syncthreads()
        if masked and bad:
            weigh(sm, sS, b, O, ty, tx)
        else:
            accumulate(sm, sS, b, x, O, ty, tx)
        cuda.syncthreads()

    return product


@cache
def zeros(rows: int, d: int, threads: int) -> Any:
    """A = 0 for A (batch, heads, N, d) in float32, a block for each group of rows."""
    fours, row = d % 4 == 0, max(1, d // 4)

    @kernel(threads)
    def backward_zeros(A):
        tid = int32(cuda.threadIdx.x)
        H, N = uint32(A.shape[1]), int32(A.shape[2])
        Tr, block = uint32(uint32(N + (rows - 1)) // uint32(rows)), uint32(cuda.blockIdx.x)
        i0, bh = int32(block % Tr * rows), uint32(block // Tr)
        Ah, zero = A[bh // H, bh % H], float32(0)
        if fours and in_fours(Ah):
            for e in range(tid, min(rows, N - i0) * row, threads):
                r, c = uint32(e) // uint32(row), uint32(e) % uint32(row)
                store_four(Ah, uint32(i0 + r), uint32(4 * c), (zero, zero, zero, zero))
        else:
            for e in range(tid, min(rows, N - i0) * d, threads):
                Ah[i0 + int32(uint32(e) // uint32(d)), int32(uint32(e) % uint32(d))] = zero

    return backward_zeros


@cache
def rounded(rows: int, d: int, dtype: str, threads: int) -> Any:
    """B = A in another dtype, for A (batch, heads, N, d) in float32; blocks as in `zeros`."""
    to_stored = narrow(dtype)

    @kernel(threads)
    def backward_rounded(A, B):
        tid = int32(cuda.threadIdx.x)
        H, N = A.shape[1], A.shape[2]
        Tr = (N + rows - 1) // rows
        i0, bh = cuda.blockIdx.x % Tr * rows, cuda.blockIdx.x // Tr
        Ah, Bh = A[bh // H, bh % H], B[bh // H, bh % H]
        for e in range(tid, min(rows, N - i0) * d, threads):
            r, c = uint32(e) // uint32(d), uint32(e) % uint32(d)
            Bh[i0 + int32(r), int32(c)] = to_stored(load(Ah, uint32(i0 + r), uint32(c)))

    return backward_rounded
