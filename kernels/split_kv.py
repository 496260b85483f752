"""Split-KV decoding: few queries, many keys, so the keys are shared out over blocks, then merged.

The first kernel is flash2's, with a block for each part of the keys and float32 partial results.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from .gpu import cuda, device, exp2, float32, kernel, load, log, narrow, uint32
from .masks import LOG2E

LOADS = 16  # that a thread has under way


def columns_at_a_time(d: int, threads: int) -> int:
    """Threads of a block that have a column each; as many more have a share of the parts."""
    return min(threads, -(-d // 32) * 32)


@cache
def merge(parts: int, d: int, threads: int, dtype: str) -> Any:
    """O and L of all keys from those of the parts, a block for each row.

    O_parts (parts batch, heads, Nq, d) and L_parts (parts batch, heads, Nq) are float32. Section 3
    of Dao 2023 (arXiv:2307.08691): partial results merge by their logsumexp.
    """
    log2e, ln2 = LOG2E, 1 / LOG2E
    wide = columns_at_a_time(d, threads)
    groups = threads // wide
    turns = -(-parts // groups)  # parts of a group
    sums = parts  # where they are on chip, behind the weights
    to_stored = narrow(dtype)

    @device
    def fetch(x, O_parts, B, b, h, i, c, g, first):
        for u in range(LOADS):
            n = uint32(g + groups * (first + u))
            if n < parts and c < d:
                x[u] = load(O_parts[n * B + b, h], uint32(i), uint32(c))

    @kernel(threads)
    def split_kv_merge(O_parts, L_parts, O, L):
        sm = cuda.shared.array(0, float32)
        tid = uint32(cuda.threadIdx.x)
        g, t = uint32(tid // uint32(wide)), uint32(tid % uint32(wide))
        B, H, Nq = uint32(O.shape[0]), uint32(O.shape[1]), uint32(O.shape[2])
        row = uint32(cuda.blockIdx.x)
        i, bh = uint32(row % Nq), uint32(row // Nq)
        h, b = uint32(bh % H), uint32(bh // H)
        x = cuda.local.array(LOADS, float32)
        fetch(x, O_parts, B, b, h, i, t, g, 0)  # under way while the weights are computed
        for n in range(tid, parts, threads):
            sm[n] = load(L_parts[n * B + b], h, i) * float32(log2e)
        cuda.syncthreads()
        m = -float32(float("inf"))
        for n in range(parts):
            m = max(m, sm[n])
        shift = m if m != -float32(float("inf")) else float32(0)
        cuda.syncthreads()
        for n in range(tid, parts, threads):
            sm[n] = exp2(sm[n] - shift)
        cuda.syncthreads()
        l = float32(0)
        for n in range(parts):
            l += sm[n]
        over = float32(1) / l if l != float32(0) else float32(0)
        for c0 in range(0, d, wide):
            c, o = uint32(c0 + t), float32(0)
            for first in range(0, turns, LOADS):
                if c0 > 0 or first > 0:
                    fetch(x, O_parts, B, b, h, i, c, g, first)
                for u in range(LOADS):
                    n = uint32(g + groups * (first + u))
                    weight = sm[n] if n < parts else float32(0)
                    o += weight * x[u] if weight != float32(0) else float32(0)
            sm[sums + tid] = o
            cuda.syncthreads()
            if g == 0 and c < d:
                for other in range(1, groups):
                    o += sm[sums + other * wide + t]
                O[b, h, i, c] = to_stored(o * over if over != float32(0) else float32(0))
            cuda.syncthreads()
        if tid == 0:
            L[b, h, i] = shift * float32(ln2) + log(l)

    return split_kv_merge
