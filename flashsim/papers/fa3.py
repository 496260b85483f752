"""FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608): Tables 2 and 3, recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from ..attention import attention
from ..cost.io import io_cost

Array = np.ndarray[Any, Any]
E4M3_MAX = 448.0


def rates(N: int, d: int, heads: int, batch: int, ms: Sequence[float]) -> list[float]:
    """Table 2, TFLOP/s."""
    flops = io_cost("flash2", N=N, d=d, heads=heads, batch=batch).flops
    return [flops / t / 1e9 for t in ms]


@cache
def _problem(N: int, d: int, queries: int, seed: int) -> tuple[Array, Array, Array, Array]:
    """q (queries, d), k, v (N, d) with outliers, and the output in float64."""
    rng = np.random.default_rng(seed)

    def entries(n: int) -> Array:
        outliers = rng.random((n, d)) < 0.001
        return rng.standard_normal((n, d)) + 10 * rng.standard_normal((n, d)) * outliers

    q, k, v = entries(queries), entries(N), entries(N)
    return q, k, v, _softmax(q @ k.T * d**-0.5) @ v


def _softmax(S: Array) -> Array:
    P = np.exp(S - S.max(axis=1, keepdims=True))
    return np.asarray(P / P.sum(axis=1, keepdims=True))


def _rmse(output: Array, exact: Array) -> float:
    return float(np.sqrt(np.mean((output - exact) ** 2)))


def _half(x: Array) -> Array:
    """Rounded to float16, for sums in float32."""
    return x.astype(np.float16).astype(np.float32)


def fp16_errors(N: int, d: int, queries: int, seed: int) -> list[float]:
    """Table 3, FP16, RMSE in 1e-4: standard attention, FlashAttention-2."""
    q, k, v, exact = _problem(N, d, queries, seed)
    halves = [x.astype(np.float16) for x in (q, k, v)]
    flash = attention(*halves, algorithm="flash2", tiles=(128, 128)).output
    Q, K, V = map(_half, (q, k, v))
    standard = _half(_half_softmax(_half(Q @ K.T * np.float32(d**-0.5))) @ V)
    return [1e4 * _rmse(output, exact) for output in (standard, flash.astype(np.float64))]


def _half_softmax(S: Array) -> Array:
    """Softmax that keeps every intermediate result in float16."""
    P = _half(np.exp(_half(S - S.max(axis=1, keepdims=True))))
    return _half(P / _half(P.sum(axis=1, keepdims=True)))


def fp8_errors(N: int, d: int, queries: int, block: int, seed: int) -> list[float]:
    """Table 3, FP8, RMSE in 1e-3: standard, FlashAttention-3, no blocks, no rotation."""
    q, k, v, exact = _problem(N, d, queries, seed)
    rotation = np.random.default_rng(seed).choice([-1.0, 1.0], d)[:, None] * _hadamard(d)
    rotated = q @ rotation, k @ rotation, v
    outputs = (
        _standard_fp8(q, k, v),
        _flash_fp8(*rotated, block=block, scaled=block),
        _flash_fp8(*rotated, block=block, scaled=N),
        _flash_fp8(q, k, v, block=block, scaled=block),
    )
    return [1e3 * _rmse(output, exact) for output in outputs]


def _hadamard(d: int) -> Array:
    """Orthogonal, (d, d), all entries of one size; d is a power of two."""
    H = np.ones((1, 1))
    while len(H) < d:
        H = np.block([[H, H], [H, -H]])
    return np.asarray(H / np.sqrt(d))


def _quantised(x: Array, rows: int) -> Array:
    """x (N, d) as float16, rounded to e4m3 with one scale for each so many rows."""
    parts = []
    for start in range(0, len(x), rows):
        part = _half(x[start : start + rows])
        scale = np.abs(part).max() / np.float32(E4M3_MAX)
        parts.append(_e4m3(part / scale) * scale)
    return np.concatenate(parts)


def _e4m3(x: Array) -> Array:
    return x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _standard_fp8(q: Array, k: Array, v: Array) -> Array:
    """One scale for each of Q, K, V; the softmax in float16; P rounded to e4m3."""
    Q, K, V = (_quantised(x, len(x)) for x in (q, k, v))
    S = _half(Q @ K.T * np.float32(q.shape[1] ** -0.5))
    return _half(_e4m3(_half_softmax(S)) @ V)


def _flash_fp8(q: Array, k: Array, v: Array, *, block: int, scaled: int) -> Array:
    """FlashAttention-2's loop over key tiles of `block`, a scale for each `scaled` rows."""
    Q, K, V = (_quantised(x, scaled) for x in (q, k, v))
    m, l = np.full(len(Q), -np.inf, np.float32), np.zeros(len(Q), np.float32)
    O = np.zeros((len(Q), V.shape[1]), np.float32)
    for j in range(0, len(K), block):
        S = Q @ K[j : j + block].T * np.float32(Q.shape[1] ** -0.5)
        m_new = np.maximum(m, S.max(axis=1))
        alpha, P = np.exp(m - m_new), np.exp(S - m_new[:, None])
        l = alpha * l + P.sum(axis=1)
        O, m = alpha[:, None] * O + _e4m3(P) @ V[j : j + block], m_new
    return _half(O / l[:, None])
