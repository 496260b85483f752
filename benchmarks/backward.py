"""What the backward pass's speed claims rest on: ratios from one run, each with its requirement.

    python benchmarks/backward.py        # about a minute; BLAS as it comes
    OPENBLAS_NUM_THREADS=1 python benchmarks/backward.py

Standard attention keeps its weights P from the forward pass; FlashAttention-2 keeps one number a
row and computes them again. The medians and the tracer are those of `core.py`.
"""

import numpy as np
from core import medians, peak_bytes, report

from flashsim.algorithms.flash2 import flash_attention_2, flash_attention_2_backward
from flashsim.dropout import Dropout
from flashsim.masks import Mask

HEADS, N, d = 4, 4096, 64


def weights(q, k):
    """P, as standard attention's forward pass leaves it."""
    S = q @ np.swapaxes(k, -1, -2) * q.dtype.type(d**-0.5)
    S -= S.max(axis=-1, keepdims=True)
    np.exp(S, out=S)
    S /= S.sum(axis=-1, keepdims=True)
    return S


def flash2_forward(q, k, v, Br, Bc):
    """O and L, as FlashAttention-2's forward pass leaves them."""
    O, L = np.empty_like(q), np.empty(q.shape[:-1], q.dtype)
    for h in range(HEADS):
        flash_attention_2(
            q[h], k[h], v[h], O[h], L[h],
            Br=Br, Bc=Bc, scale=d**-0.5, mask=Mask(N, N), drop=Dropout(0, 0, 0, h),
        )  # fmt: skip
    return O, L


def flash2(q, k, v, O, L, do, Br, Bc):
    """FlashAttention-2's backward pass over heads, on plain arrays."""
    dq, dk, dv = np.empty_like(q), np.empty_like(k), np.empty_like(v)
    D = np.empty(N, q.dtype)
    for h in range(HEADS):
        flash_attention_2_backward(
            q[h], k[h], v[h], O[h], L[h], do[h], dq[h], dk[h], dv[h], D,
            Br=Br, Bc=Bc, scale=d**-0.5, mask=Mask(N, N), drop=Dropout(0, 0, 0, h),
        )  # fmt: skip
    return dq, dk, dv


def textbook(q, k, v, P, do):
    """Standard attention's backward pass as one writes it down."""
    scale = q.dtype.type(d**-0.5)
    dv = np.swapaxes(P, -1, -2) @ do
    dP = do @ np.swapaxes(v, -1, -2)
    dS = P * (dP - (P * dP).sum(axis=-1, keepdims=True))
    return dS @ k * scale, np.swapaxes(dS, -1, -2) @ q * scale, dv


def in_place(q, k, v, P, do):
    """The same with care: one N x N buffer, reused for every head; rowsum(P dP) is rowsum(dO O)."""
    dq, dk, dv = np.empty_like(q), np.empty_like(k), np.empty_like(v)
    dS, scale = np.empty((N, N), q.dtype), q.dtype.type(d**-0.5)
    for h in range(HEADS):
        np.matmul(P[h].T, do[h], out=dv[h])
        np.matmul(do[h], v[h].T, out=dS)
        dS -= np.einsum("ij,ij->i", P[h], dS)[:, None]
        dS *= P[h]
        np.matmul(dS, k[h], out=dq[h])
        np.matmul(dS.T, q[h], out=dk[h])
        dq[h] *= scale
        dk[h] *= scale
    return dq, dk, dv


def main():
    q, k, v, do = np.random.default_rng(0).standard_normal((4, HEADS, N, d), dtype=np.float32)
    P, (O, L) = weights(q, k), flash2_forward(q, k, v, 256, 512)
    contestants = {
        "flash2": lambda: flash2(q, k, v, O, L, do, 256, 512),
        "textbook": lambda: textbook(q, k, v, P, do),
        "in_place": lambda: in_place(q, k, v, P, do),
    }
    results = {name: run() for name, run in contestants.items()}
    for name in ("textbook", "in_place"):
        for mine, other in zip(results["flash2"], results[name], strict=True):
            np.testing.assert_allclose(mine, other, rtol=0, atol=1e-5)

    t = medians(5, **contestants)
    print(
        f"backward, {HEADS} heads, N={N}, d={d}, float32: "
        + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in t.items())
    )
    report(
        "textbook standard / plain flash2, 256x512 tiles",
        t["textbook"] / t["flash2"],
        "x",
        ">= 1.0",
    )
    report("in-place standard / plain flash2", t["in_place"] / t["flash2"], "x", "reported")

    outputs = sum(x.nbytes for x in results["flash2"])
    kept = {"flash2": L.nbytes, "textbook": P.nbytes, "in_place": P.nbytes}
    held = {name: peak_bytes(run) - outputs for name, run in contestants.items()}
    for name in ("textbook", "in_place"):
        other = f"flash2 / {name.replace('_', '-')} standard"
        share = (held["flash2"] + kept["flash2"]) / (held[name] + kept[name])
        report(f"extra memory, kept P or L included, {other}", 100 * share, "%", "< 3")
        report(f"  without them, {other}", 100 * held["flash2"] / held[name], "%", "reported")


if __name__ == "__main__":
    main()
