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


def shared_bytes(parts: int, d: int, threads: int) -> int:
    """Of a block that merges: L of the parts; of each thread a sum; m and l of each group."""
    groups = threads // columns_at_a_time(d, threads)
    return 4 * (parts + threads + 2 * groups)


@cache
def merge(parts: int, d: int, threads: int, dtype: str) -> Any:
    """O and L of all keys from those of the parts, a block for each row.

    O_parts (parts batch, heads, Nq, d) and L_parts (parts batch, heads, Nq) are float32. Section 3
    of Dao 2023 (arXiv:2307.08691): partial results merge by their logsumexp. Groups of threads do
    so for a share of the parts each, and then their results are merged, by the same rule.
    """
    log2e, ln2 = LOG2E, 1 / LOG2E
    wide = columns_at_a_time(d, threads)
    groups = threads // wide
    turns = -(-parts // groups)  # parts of a group
    sums, maxima = parts, parts + threads  # where they are on chip, behind L of the parts
    totals = maxima + groups
    to_stored = narrow(dtype)

    @device
    def fetch(x, O_parts, B, b, h, i, c, g, first):
        for u in range(LOADS):
            n = uint32(g + groups * (first + u))
            if n < parts and c < d:
                x[u] = load(O_parts[n * B + b, h], uint32(i), uint32(c))

    @device
    def finite(m):
        """What weights are relative to: the largest L, or 0 if no key counts."""
        return m if m != -float32(float("inf")) else float32(0)

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
        for u in range(turns):
            n = uint32(g + groups * u)
            if n < parts:
                m = max(m, sm[n])
        for c0 in range(0, d, wide):
            c, o, l = uint32(c0 + t), float32(0), float32(0)
            for first in range(0, turns, LOADS):
                if c0 > 0 or first > 0:
                    fetch(x, O_parts, B, b, h, i, c, g, first)
                for u in range(LOADS):
                    n = uint32(g + groups * (first + u))
                    weight = exp2(sm[n] - finite(m)) if n < parts else float32(0)
                    l += weight
                    o += weight * x[u] if weight != float32(0) else float32(0)
            sm[sums + tid] = o
            if t == 0:
                sm[maxima + g], sm[totals + g] = m, l
            cuda.syncthreads()
            if g == 0:
                top, o, l = -float32(float("inf")), float32(0), float32(0)
                for other in range(groups):
                    top = max(top, sm[maxima + other])
                for other in range(groups):
                    weight = exp2(sm[maxima + other] - finite(top))
                    l += weight * sm[totals + other]
                    o += weight * sm[sums + other * wide + t]
                if c < d:
                    O[b, h, i, c] = to_stored(o / l if l != float32(0) else float32(0))
                if c == 0:
                    L[b, h, i] = finite(top) * float32(ln2) + log(l)
            cuda.syncthreads()

    return split_kv_merge
