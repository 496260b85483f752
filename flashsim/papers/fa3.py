"""FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608): Tables 2 and 3, recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ..attention import attention
from ..cost.io import io_cost
from ..fp8 import quantised, rounded

Array = np.ndarray[Any, Any]


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
    flash = attention(*halves, algorithm="flash3", tiles=(128, 128)).output
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
    halves = [x.astype(np.float16) for x in (q, k, v)]

    def flash(rows: int, incoherent: bool) -> Array:
        out = attention(
            *halves, algorithm="flash3-fp8", fp8=rows, incoherent=incoherent, tiles=(block, block)
        )
        return np.asarray(out.output, np.float64)

    outputs = _standard_fp8(*halves), flash(block, True), flash(N, True), flash(block, False)
    return [1e3 * _rmse(output, exact) for output in outputs]


def _standard_fp8(q: Array, k: Array, v: Array) -> Array:
    """One scale for each of Q, K, V; the softmax in float16; P rounded to e4m3."""
    Q, K, V = (_there_and_back(x.astype(np.float32)) for x in (q, k, v))
    S = _half(Q @ K.T * np.float32(q.shape[1] ** -0.5))
    return _half(rounded(_half_softmax(S)) @ V)


def _there_and_back(x: Array) -> Array:
    values, scale = quantised(x, len(x))
    return np.asarray(values.astype(np.float32) * scale[:, None])
