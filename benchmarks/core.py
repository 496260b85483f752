"""What the core's speed claims rest on: ratios from one run, each printed with its requirement.

    python benchmarks/core.py            # about two minutes; BLAS as it comes
    OPENBLAS_NUM_THREADS=1 python benchmarks/core.py

Contestants of a ratio take turns, so that a machine that slows down slows both; the median counts.
"""

import statistics
import subprocess
import sys
import time
import tracemalloc

import numpy as np

from flashsim.algorithms.flash2 import flash_attention_2
from flashsim.dropout import Dropout
from flashsim.masks import Mask
from flashsim.memory import Machine


def flash2(q, k, v, Br, Bc, machine=None):
    """FlashAttention-2 over heads, on plain arrays or on a machine's HBM."""
    N, d = q.shape[-2:]
    O = np.empty_like(q)
    for h in range(len(q)):
        arrays = {"Q": q[h], "K": k[h], "V": v[h], "O": O[h], "L": np.empty(N, q.dtype)}
        if machine is not None:
            arrays = machine.hbm(**arrays)
        flash_attention_2(
            *arrays.values(), Br=Br, Bc=Bc, scale=d**-0.5, mask=Mask(N, N), drop=Dropout(0, 0, 0, h)
        )
    return O


def textbook(q, k, v):
    """Standard attention as one writes it down."""
    S = q @ np.swapaxes(k, -1, -2) / np.float32(np.sqrt(q.shape[-1]))
    P = np.exp(S - S.max(axis=-1, keepdims=True))
    P = P / P.sum(axis=-1, keepdims=True)
    return P @ v


def in_place(q, k, v):
    """Standard attention with care: one N x N buffer, reused for every head."""
    N, d = q.shape[-2:]
    O, S = np.empty_like(q), np.empty((N, N), q.dtype)
    for h in range(len(q)):
        np.matmul(q[h] * q.dtype.type(d**-0.5), k[h].T, out=S)
        S -= S.max(axis=-1, keepdims=True)
        np.exp(S, out=S)
        S /= S.sum(axis=-1, keepdims=True)
        np.matmul(S, v[h], out=O[h])
    return O


def medians(turns, **contestants):
    """Median seconds of each, the contestants taking turns after one warm-up each."""
    seconds = {name: [] for name in contestants}
    for turn in range(turns + 1):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(s) for name, s in seconds.items()}


def peak_bytes(run):
    """The most memory that NumPy and Python held during a run, beyond what they held before."""
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def report(what, value, unit, required):
    print(f"{what:<62} {value:8.3f} {unit:<3} (required: {required})")


def main():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 1024, 64), dtype=np.float32)
    t = medians(
        15,
        plain=lambda: flash2(q, k, v, 64, 64),
        counted=lambda: flash2(q, k, v, 64, 64, Machine()),
    )
    report(
        "counted / plain flash2, N=1024, d=64, 64x64 tiles",
        t["counted"] / t["plain"],
        "x",
        "<= 1.3",
    )

    q, k, v = rng.standard_normal((3, 4, 8192, 64), dtype=np.float32)
    t = medians(
        3,
        flash2=lambda: flash2(q, k, v, 512, 1024),
        textbook=lambda: textbook(q, k, v),
        in_place=lambda: in_place(q, k, v),
    )
    print("4 heads, N=8192, d=64, float32: " + ", ".join(f"{n} {s:.2f} s" for n, s in t.items()))
    report(
        "textbook standard / plain flash2, default tiles (512x1024)",
        t["textbook"] / t["flash2"],
        "x",
        ">= 1.3",
    )
    report("in-place standard / plain flash2", t["in_place"] / t["flash2"], "x", ">= 1.0")

    q, k, v = rng.standard_normal((3, 1, 16384, 64), dtype=np.float32)
    ours = peak_bytes(lambda: flash2(q, k, v, 512, 1024)) - q.nbytes
    theirs = peak_bytes(lambda: in_place(q, k, v)) - q.nbytes
    report("extra memory of flash2 / in-place standard, N=16384", 100 * ours / theirs, "%", "< 2")

    def command(*words):
        start = time.perf_counter()
        subprocess.run([sys.executable, *words], check=True, capture_output=True)
        return time.perf_counter() - start

    bare = min(command("-c", "pass") for _ in range(5))
    imported = min(command("-c", "import flashsim") for _ in range(5))
    report("import flashsim, over a bare interpreter", imported - bare, "s", "< 0.3")
    report("flashsim run, on the built-in sample", command("-m", "flashsim", "run"), "s", "< 10")
    million = ["-m", "flashsim", "io", "--N", "1048576", "--d", "64"]
    report("flashsim io, N = 1,048,576, start-up included", command(*million), "s", "< 1")


if __name__ == "__main__":
    main()
