"""The closed form of a whole call, summed over batch and heads: of sizes, or of a call made."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from .. import checks
from ..algorithms import ALGORITHMS, Algorithm, Backward, backward_of, check_required
from ..attention import Attention
from ..checks import bad, bad_type
from ..masks import Mask, band
from ..memory import widened
from ..problem import block_layout, checked, local_layout, parts_of_keys, rows_of_a_scale
from .counts import Cost, Head
from .counts_backward import group_sum
from .tiles import default_tiles, usable

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


def io_cost(
    algorithm: str,
    *,
    N: int,
    d: int,
    Br: int | None = None,
    Bc: int | None = None,
    Nk: int | None = None,
    dv: int | None = None,
    heads: int = 1,
    kv_heads: int | None = None,
    batch: int = 1,
    is_causal: bool = False,
    causal_align: str = "bottom-right",
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Sequence[int] | None = None,
    block_mask: Any = None,
    local_window: int | None = None,
    projection: int | None = None,
    splits: int | None = None,
    fp8: int | None = None,
    backward: bool = False,
    dtype: str = "float32",
    sram: float | None = None,
    sram_bytes: float | None = None,
    convention: str = "literal",
) -> Cost:
    """What `attention` would read, write, compute and hold, in closed form.

    Parameters
    ----------
    algorithm : str
        A name in `flashsim.ALGORITHMS`.
    N, Nk : int
        Queries, and keys (default: as many).
    d, dv : int
        Width of Q and K, and of V (default: d).
    Br, Bc : int, optional
        Rows of a query and of a key tile; default: what `attention` would take for the budget.
    heads, kv_heads, batch : int
        Query heads, key heads (a divisor), items. Each query head reads K and V for itself; the
        backward pass adds up the gradients of those that share a key head.
    is_causal, causal_align, window, convention
        As in `attention`.
    key_lengths : sequence of int, optional
        Real keys of each item, the rest is padding; one per item of the batch. For "paged" the
        keys of each sequence, which has no padding.
    block_mask : bool array (ceil(N / Br), ceil(Nk / Bc)), optional
        Blocks of scores that are kept; needs Br and Bc.
    local_window : int, optional
        As in `attention`.
    projection : int, optional
        The k keys that "linformer" mixes the Nk into.
    splits, fp8 : int, optional
        As in `attention`.
    backward : bool
        The backward pass instead of the forward one.
    dtype : {"float16", "bfloat16", "float32", "float64"}
        Of Q, K, V; only bytes depend on it.
    sram, sram_bytes : number, optional
        Budget: picks the tiles if there are none, and decides whether a row of standard attention's
        S fits on chip (it is read once) or not (twice).

    Returns
    -------
    Cost
        reads, writes (elements per array), total_elements, total_bytes, flops, exps,
        sram_elements, sram_bytes, extra_hbm_elements.

    Raises
    ------
    ValueError, TypeError
        If an argument is unusable; the message names it, its value and what is accepted.
    """
    checks.choice("algorithm", algorithm, ALGORITHMS)
    checks.choice("convention", convention, checks.CONVENTIONS)
    row = _pass(algorithm, convention, checks.flag("backward", backward))
    N, d = checks.integer("N", N, 0), checks.integer("d", d, 1)
    Nk = N if Nk is None else checks.integer("Nk", Nk, 0)
    dv = d if dv is None else checks.integer("dv", dv, 1)
    heads, batch = checks.integer("heads", heads, 0), checks.integer("batch", batch, 0)
    shared = heads if kv_heads is None else checks.integer("kv_heads", kv_heads, 0)
    if shared != heads and (shared == 0 or heads % shared):
        raise bad("kv_heads", kv_heads, f"a divisor of heads={heads}")
    checks.choice("causal_align", causal_align, checks.ALIGNMENTS)
    rules: dict[str, Any] = {
        "is_causal": checks.flag("is_causal", is_causal),
        "causal_align": causal_align,
        "window": checks.window_sides(window),
    }
    lo, hi = band(N, Nk, **rules)
    stored = DTYPES[checks.choice("dtype", dtype, DTYPES)]
    limits = checks.budgets(sram, sram_bytes)

    def head(mask: Mask) -> Head:
        group = heads // shared if shared else 1
        wide = widened(stored).itemsize
        return Head(mask, d, dv, stored.itemsize, wide, group, unmixed=unmixed, splits=parts)

    in_pages = ALGORITHMS[algorithm].requires == "block_tables"
    check_required(
        algorithm, block_mask=block_mask, local_window=local_window, projection=projection,
        splits=splits, fp8=fp8, block_tables=True if in_pages else None,
    )  # fmt: skip
    rows_of_a_scale(fp8, stored)
    parts = 1
    if "splits" in ALGORITHMS[algorithm].options:
        parts = parts_of_keys(splits, batch * heads, N, Nk, d)
    layout = block_layout(block_mask, None if Br is None else (Br, Bc), N, Nk)
    if local_window is not None:
        layout = local_layout(local_window, N, Nk, block_mask)
    lengths = _lengths(key_lengths, batch, Nk)
    unmixed = 0
    if projection is not None:
        if layout is not None or is_causal or window is not None:
            raise bad("projection", projection, "None with a mask")
        unmixed, Nk = Nk, checks.integer("projection", projection, 1, max(1, Nk) + 1)
        lengths = Counter({Nk: batch})  # padded keys are read like others
    Br, Bc = _tiles(Br, Bc, row, head(Mask(N, Nk)), limits)
    total = Cost()
    for length, items in lengths.items():
        real = None if length == Nk else np.arange(Nk) < length
        one = head(Mask(N, Nk, lo=lo, hi=hi, keys=real, layout=layout))
        if in_pages:
            lo, hi = band(N, length, **rules)
            one = head(Mask(N, length, lo=lo, hi=hi))
        cost = row.count(
            one, Br=Br, Bc=Bc, elide=convention == "elided", **row.more(one, *limits)
        ).times(heads)
        if backward and shared != heads:
            cost = cost.plus(group_sum(one, Bc=Bc).times(shared))
        total = total.plus(cost.times(items))
    return total


def _pass(algorithm: str, convention: str, backward: bool) -> Algorithm | Backward:
    return backward_of(algorithm, convention) if backward else ALGORITHMS[algorithm]


def expected_cost(
    out: Attention,
    q: Any,
    k: Any,
    v: Any,
    *,
    sram: float | None = None,
    sram_bytes: float | None = None,
    convention: str = "literal",
    backward: bool = False,
    wrt_mask: bool = False,
    **what: Any,
) -> Cost:
    """The closed form of the very call that gave `out`, any mask included.

    Parameters
    ----------
    out : Attention
        What `attention` returned; its algorithm and tiles are taken.
    q, k, v, sram, sram_bytes, convention, **what
        The other arguments of that call, without `tiles`; `splits` may be left out.
    backward, wrt_mask : bool
        The closed form of the last `out.backward(do, wrt_mask=...)` instead.
    """
    row = _pass(out.algorithm, convention, backward)
    tiles = out.tiles_backward or out.tiles if backward else out.tiles
    problem = checked(q, k, v, **{**what, "splits": out.splits}, tiles=out.tiles)
    *batch, heads = problem.lead
    size = replace(problem.head, d_mask=problem.d_mask if backward and wrt_mask else "")
    elide = convention == "elided"
    total = Cost()
    for item in np.ndindex(*batch):
        one = replace(size, mask=problem.mask((*item, 0)))
        more = row.more(one, *checks.budgets(sram, sram_bytes))
        Br, Bc = usable(row, tiles, one)
        total = total.plus(row.count(one, Br=Br, Bc=Bc, elide=elide, **more).times(heads))
        if backward and problem.group > 1:
            total = total.plus(group_sum(one, Bc=Bc).times(heads // problem.group))
    if size.d_mask and not elide:
        total.writes["dmask"] = total.writes.get("dmask", 0) + math.prod(problem.array_shape)
    return total


def _lengths(key_lengths: Any, batch: int, Nk: int) -> Counter[int]:
    """How many items have how many real keys."""
    if key_lengths is None:
        return Counter({Nk: batch})
    if not isinstance(key_lengths, Iterable):
        raise bad_type("key_lengths", key_lengths, f"one length for each of the {batch} items")
    lengths = [checks.integer(f"key_lengths[{n}]", x, 0, Nk + 1) for n, x in enumerate(key_lengths)]
    if len(lengths) != batch:
        raise bad("key_lengths", key_lengths, f"one length for each of the batch={batch} items")
    return Counter(lengths)


def _tiles(
    Br: int | None,
    Bc: int | None,
    row: Algorithm | Backward,
    head: Head,
    limits: tuple[float, float],
) -> tuple[int, int]:
    if Br is not None and Bc is not None:
        return usable(row, (checks.integer("Br", Br, 1), checks.integer("Bc", Bc, 1)), head)
    if Br is not None or Bc is not None:
        name, value = ("Br", Br) if Bc is None else ("Bc", Bc)
        raise bad(name, value, "both Br and Bc, or neither")
    return default_tiles(row, head, *limits)
