"""Elements read and written in all, written out: dense attention of one head, Nk = N and dv = d.

These are formulas to read. `flashsim.cost` has the closed forms that count, for any mask and array
by array; `value` evaluates a formula so that it can be held against them.
"""

import ast
import math
from fractions import Fraction

from flashsim.cost.counts import QUERY_CHUNK

# (algorithm, backward): the formulas by convention. Of standard attention, on a chip that holds a
# row of S. Tr = ceil(N / Br), Tc = ceil(N / Bc), Td = ceil(d / Bc), Tk = ceil(k / Br),
# Tw = ceil(w / Br); s is the share of blocks that a layout keeps. Local: w divides N, and w < N.
# Block-sparse: the tiles divide N, and every row and every column of blocks has a block. Split-KV:
# n > 1 parts. Chunked: C chunks of keys, Tq tiles in the chunks of queries, which divide N.
CLOSED_FORMS = {
    ("standard", False): {"literal": "4 * N**2 + (2 * Tr + 2) * N * d"},
    ("standard", True): {"literal": "7 * N**2 + (2 * Tr + 2 * Tc + 4) * N * d"},
    ("standard-unfused", False): {"literal": "9 * N**2 + (2 * Tr + 2) * N * d"},
    ("standard-unfused", True): {"literal": "10 * N**2 + (2 * Tr + 2 * Tc + 4) * N * d"},
    ("flash1", False): {
        "literal": "(3 * Tc + 3) * N * d + (4 * Tc + 2) * N",
        "elided": "(3 * Tc + 1) * N * d + (4 * Tc - 2) * N",
    },
    ("flash1", True): {
        "literal": "(5 * Tc + 7) * N * d + 2 * Tc * N",
        "elided": "(4 * Tc + 4) * N * d + 3 * Tc * N",
    },
    ("flash2", False): {"literal": "(2 * Tr + 2) * N * d + N"},
    ("flash2", True): {
        "literal": "(4 * Tc + 7) * N * d + (2 * Tc + 1) * N",
        "elided": "(4 * Tc + 5) * N * d + (2 * Tc + 1) * N",
    },
    ("flash2-two-kernel", True): {"literal": "(2 * Tc + 2 * Tr + 9) * N * d + (2 * Tc + 3) * N"},
    ("square-tiles", False): {"literal": "(2 * Tr + Tc + 1) * N * d + (Td + 1) * N**2 + 4 * N"},
    ("resident-scores", False): {
        "literal": "(2 * Tr + 3 * Tc + 1) * N * d + N",
        "elided": "(2 * Tr + 3 * Tc - 1) * N * d + N",
    },
    ("linformer", False): {"literal": "6 * N * k + (2 * Tk + 2) * N * d + (2 * Tr + 2) * k * d"},
    ("local", False): {
        "literal": "4 * (3 * N * w - 2 * w**2) + 2 * Tw * (3 * N - 2 * w) * d + 2 * N * d"
    },
    ("split_kv", False): {"literal": "(2 * Tr + 3 * n + 1) * N * d + (2 * n + 1) * N"},
    ("paged", False): {"literal": "(2 * Tr + 2) * N * d + N"},
    ("flash3", False): {"literal": "(2 * Tr + 2) * N * d + N"},
    ("flash3-fp8", False): {"literal": "(2 * Tr + 2) * N * d + N"},
    ("flash4", False): {"literal": "(2 * Tr + 2) * N * d + N"},
    ("online_softmax", False): {"literal": "2 * N**2 * d + 2 * N * d + N"},
    ("rabe_staats", False): {"literal": "4 * N**2 + (2 * Tq + 3 * C + 1) * N * d + 5 * C * N"},
    ("block_sparse", False): {
        "literal": "(3 * s * Tc + 3) * N * d + (4 * s * Tc + 2) * N",
        "elided": "(3 * s * Tc + 1) * N * d + (4 * s * Tc - 2) * N",
    },
    ("block_sparse", True): {
        "literal": "(5 * s * Tc + 7) * N * d + 2 * s * Tc * N",
        "elided": "(4 * s * Tc + 4) * N * d + 3 * s * Tc * N",
    },
}


def closed_forms(algorithm: str, backward: bool, forward_of: str = "") -> dict[str, str]:
    """The formulas of a pass by convention; none where a mask or a window decides."""
    own = CLOSED_FORMS.get((algorithm, backward))
    return own or CLOSED_FORMS.get((forward_of, backward), {})


def value(
    formula: str,
    *,
    N: int,
    d: int,
    Br: int,
    Bc: int,
    k: int = 0,
    w: int = 0,
    n: int = 1,
    s: Fraction | int = 1,
) -> Fraction | int:
    """What a formula comes to, in elements."""
    Br, Bc = min(Br, N), min(Bc, N)  # no tile is longer than the arrays
    over = {"Tr": (N, Br), "Tc": (N, Bc), "Td": (d, Bc), "Tk": (k, Br), "Tw": (w, Br)}
    tiles = {name: -(-length // block) for name, (length, block) in over.items()}
    queries, keys = min(QUERY_CHUNK, N), math.isqrt(N - 1) + 1
    chunks = {"C": -(-N // keys), "Tq": N // queries * -(-queries // Br)}
    sizes = {"N": N, "d": d, "k": k, "w": w, "n": n, "s": s}
    return eval(formula, {}, sizes | tiles | chunks)


def tex(formula: str) -> str:
    """A formula as TeX."""
    return _tex(ast.parse(formula, mode="eval").body)


def _tex(node: ast.expr) -> str:
    match node:
        case ast.Constant(value):
            return str(value)
        case ast.Name(name):
            return name if len(name) == 1 else f"{name[0]}_{name[1:]}"
        case ast.BinOp(left, ast.Pow(), right):
            return f"{_tex(left)}^{_tex(right)}"
        case ast.BinOp(left, ast.Mult(), right):
            return rf"{_factor(left)}\,{_factor(right)}"
        case ast.BinOp(left, ast.Add() | ast.Sub() as sign, right):
            return f"{_tex(left)} {'+' if isinstance(sign, ast.Add) else '-'} {_tex(right)}"
    raise ValueError(f"no TeX for {ast.dump(node)}")


def _factor(node: ast.expr) -> str:
    inner = _tex(node)
    is_sum = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)
    return f"({inner})" if is_sum else inner
