"""Split-KV decoding: few queries, many keys, so the keys are shared out over blocks, then merged.

The first kernel is flash2's, with a block for each part of the keys and float32 partial results.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from .gpu import cuda, exp2, float32, kernel, load, log, narrow, uint32
from .masks import LOG2E


@cache
def merge(parts: int, threads: int, dtype: str) -> Any:
    """O and L of all keys from those of the parts, a block for each row.

    O_parts (parts batch, heads, Nq, d) and L_parts (parts batch, heads, Nq) are float32. Section 3
    of Dao 2023 (arXiv:2307.08691): partial results merge by their logsumexp.
    """
    log2e, ln2 = LOG2E, 1 / LOG2E
    to_stored = narrow(dtype)

    @kernel(threads)
    def split_kv_merge(O_parts, L_parts, O, L):
        weights = cuda.shared.array(0, float32)
        tid = cuda.threadIdx.x
        B, H, Nq, d = O.shape
        i, bh = cuda.blockIdx.x % Nq, cuda.blockIdx.x // Nq
        h, b = bh % H, bh // H
        for n in range(tid, parts, threads):
            weights[n] = load(L_parts[n * B + b], uint32(h), uint32(i)) * float32(log2e)
        cuda.syncthreads()
        m = -float32(float("inf"))
        for n in range(parts):
            m = max(m, weights[n])
        shift = m if m != -float32(float("inf")) else float32(0)
        l = float32(0)
        for n in range(parts):
            l += exp2(weights[n] - shift)
        over = float32(1) / l if l != float32(0) else float32(0)
        x = cuda.local.array(8, float32)
        for c in range(tid, d, threads):
            o = float32(0)
            for first in range(0, parts, 8):
                for u in range(8):  # loads under way before the first is waited for
                    if first + u < parts:
                        x[u] = load(O_parts[(first + u) * B + b, h], uint32(i), uint32(c))
                for u in range(8):
                    if first + u < parts:
                        w = exp2(weights[first + u] - shift)
                        if w != float32(0):
                            o += w * x[u]
            O[b, h, i, c] = to_stored(o * over if over != float32(0) else float32(0))
        if tid == 0:
            L[b, h, i] = shift * float32(ln2) + log(l)

    return split_kv_merge
