"""The front door: checks arguments, walks batches and heads, runs an algorithm, returns counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from . import checks
from .algorithms import (
    ALGORITHMS,
    BITS,
    GRADIENTS,
    SHAPES,
    Algorithm,
    Backward,
    backward_of,
    check_required,
)
from .algorithms.grouped import sum_over_group
from .checks import bad
from .cost.counts import Head
from .cost.tiles import default_tiles, usable
from .memory import Hbm, Machine, Traffic, widened
from .online_softmax import log, shift
from .problem import Problem, as_array, checked

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Call:
    """What a backward pass needs to know of the forward call."""

    algorithm: str
    convention: str
    problem: Problem
    limits: tuple[float, float]
    tiles: tuple[int, int]
    given_tiles: Any
    saved: dict[tuple[int, ...], dict[str, Array]]  # per head: O and what else is kept


@dataclass
class Attention:
    """What `attention` returns.

    Attributes
    ----------
    output : ndarray (..., Nq, dv)
        softmax(q k^T scale + mask) v, in the dtype of q.
    lse : ndarray (..., Nq)
        Natural logsumexp of the scaled, masked scores, without dropout; -inf for a row that may
        attend to nothing. At least float32.
    traffic : Traffic
        HBM reads and writes, in elements, per array and over all heads.
    sram_peak_elements, sram_peak_bytes : int
        The most that was on chip at once.
    extra_hbm_elements : int
        HBM allocated beyond Q, K, V and O, over all heads.
    rescales : ndarray (..., Nq) or None
        How often each row's O and l were rescaled after its first tile, by algorithms that do not
        rescale at every tile ("flash4").
    traffic_backward : Traffic
        The same of the last `backward`; None before.
    sram_peak_backward_elements, sram_peak_backward_bytes, extra_hbm_backward_elements : int
        The same of the last `backward`; HBM beyond the inputs, what was kept, and the gradients.
    tiles_backward : (int, int)
        The (Br, Bc) it ran with; None before.
    """

    output: Array
    lse: Array
    traffic: Traffic
    sram_peak_elements: int
    sram_peak_bytes: int
    extra_hbm_elements: int
    call: _Call = field(repr=False)
    rescales: Array | None = field(default=None, repr=False)
    traffic_backward: Traffic | None = None
    sram_peak_backward_elements: int = 0
    sram_peak_backward_bytes: int = 0
    extra_hbm_backward_elements: int = 0
    tiles_backward: tuple[int, int] | None = None

    @property
    def algorithm(self) -> str:
        """What ran."""
        return self.call.algorithm

    @property
    def tiles(self) -> tuple[int, int]:
        """The (Br, Bc) it ran with."""
        return self.call.tiles

    @property
    def splits(self) -> int:
        """The parts that the keys were cut into."""
        return self.call.problem.splits

    @property
    def kept_elements(self) -> int:
        """HBM kept for the backward pass beyond Q, K, V and O: P, or l and m, or L."""
        return sum(
            a.size for kept in self.call.saved.values() for name, a in kept.items() if name != "O"
        )

    def backward(
        self, do: Any, tiles: tuple[int, int] | None = None, *, wrt_mask: bool = False
    ) -> tuple[Array, ...]:
        """Gradients (dq, dk, dv) of sum(output * do), by the algorithm's own backward pass.

        q, k, v and the masks are read again, as a training step's are: leave them as they were.

        Parameters
        ----------
        do : array (..., Nq, dv)
            Gradient with respect to the output, in the dtype of q.
        tiles : (Br, Bc), optional
            Need not be those of the forward pass. Default: those that `attention` was given, else
            the "strict" ones of this pass.
        wrt_mask : bool
            Append the gradient with respect to a float `attn_mask`, in its shape.

        Returns
        -------
        dq, dk, dv[, dmask] : ndarray
            In the shapes of q, k, v (and the mask) and the dtype of q. `traffic_backward` and its
            companions now tell of this pass.

        Raises
        ------
        ValueError, TypeError
            If the algorithm has no backward pass, or an argument is unusable.
        """
        call, problem = self.call, self.call.problem
        row = backward_of(call.algorithm, call.convention)
        dO = problem.output_gradient(do)
        want_mask = checks.flag("wrt_mask", wrt_mask)
        if want_mask and (problem.array is None or problem.array.dtype == bool):
            raise bad("wrt_mask", wrt_mask, "False, as there is no float attn_mask")
        head = replace(problem.head, d_mask=problem.d_mask if want_mask else "")
        Br, Bc = _tiles(call.given_tiles if tiles is None else tiles, row, head, *call.limits)
        sram, sram_bytes = call.limits
        elide = call.convention == "elided"
        machine = Machine(sram=sram, sram_bytes=sram_bytes, elide=elide)
        wide, stored = widened(problem.q.dtype), problem.q.dtype
        shared = problem.group > 1
        gradients = {
            name: np.full(x.shape, np.nan, wide if name in row.wide else stored)
            for name, x in zip(GRADIENTS, (problem.q, problem.k, problem.v), strict=True)
        }
        d_mask = None
        if want_mask:
            d_mask = np.empty(problem.gradient_shape, wide)
            machine.hbm(dmask=d_mask)["dmask"].fill(0)
        parts: dict[str, list[Hbm]] = {"dK": [], "dV": []}
        for at in np.ndindex(*problem.lead):
            mine, key_head = problem.rows_at(at), problem.keys_at(at)
            mask = problem.mask(at, machine, d_mask)
            one = replace(head, mask=mask)
            own = usable(row, (Br, Bc), one)
            arrays: dict[str, Any] = machine.hbm(
                **problem.inputs(at), **call.saved[at], dO=dO[mine]
            )
            for name in row.writes:
                if name == "dQ" or (name in GRADIENTS and not shared):
                    where = mine if name == "dQ" else key_head
                    arrays |= machine.hbm(**{name: gradients[name][where]})
                else:
                    arrays[name] = machine.allocate(name, _shape(one, name), wide)
            with np.errstate(all="ignore"):
                row.run(
                    *(arrays[name] for name in (*row.reads, *row.writes)),
                    Br=own[0],
                    Bc=own[1],
                    scale=problem.scale,
                    mask=mask,
                    drop=problem.dropout(at),
                    **row.more(one, *call.limits),
                )
            if shared:
                for name, group in parts.items():
                    group.append(machine.hbm(**{name: arrays[name].data})[name])
                    if len(group) == problem.group:
                        total = machine.hbm(**{f"{name}_group": gradients[name][key_head]})
                        sum_over_group(group, *total.values(), B=max(1, own[1] // 2))
                        group.clear()
        self.traffic_backward = machine.traffic
        self.sram_peak_backward_elements = machine.peak_elements
        self.sram_peak_backward_bytes = machine.peak_bytes
        self.extra_hbm_backward_elements = machine.allocated_elements
        self.tiles_backward = Br, Bc
        results = [problem.as_given(g.astype(stored, copy=False)) for g in gradients.values()]
        if d_mask is not None and problem.array is not None:
            d_mask = d_mask.astype(problem.array.dtype, copy=False)
            results.append(d_mask.reshape(problem.array_shape))
        return tuple(results)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    algorithm: str = "flash2",
    is_causal: bool = False,
    causal_align: str = "bottom-right",
    window: tuple[int | None, int | None] | None = None,
    attn_mask: Any = None,
    key_padding_mask: Any = None,
    block_mask: Any = None,
    local_window: int | None = None,
    projection: Any = None,
    splits: int | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    block_tables: Any = None,
    seq_lens: Any = None,
    exp_emulation: tuple[float, int] | None = None,
    rescale_threshold: float | None = None,
    fp8: int | None = None,
    incoherent: bool = True,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    enable_gqa: bool = False,
    tiles: tuple[int, int] | None = None,
    sram: float | None = None,
    sram_bytes: float | None = None,
    convention: str = "literal",
) -> Attention:
    """Attention by a tiled algorithm whose memory traffic is counted.

    It is exact, softmax over every key that the masks leave, but for the algorithms that the
    registry calls approximations (`flashsim.ALGORITHMS[name].exact` is False): "local",
    "linformer" and "flash3-fp8", which run only if `local_window`, `projection` or `fp8` says how
    coarse they are.

    Parameters
    ----------
    q, k, v : array (..., Nq, d), (..., Nk, d), (..., Nk, dv)
        float16, bfloat16, float32 or float64, all three the same; heads are axis -3. They are
        never written to. Any strides give the same bits.
    algorithm : str
        A name in `flashsim.ALGORITHMS`.
    is_causal : bool
        Mask the future.
    causal_align : {"bottom-right", "top-left"}
        Where Nq != Nk: the last query sees every key, or the first query sees one (PyTorch's rule).
    window : (left, right), optional
        Query i sees keys i - left to i + right, after alignment; None on a side is no limit.
    attn_mask : bool or float array, broadcastable to (..., Nq, Nk), optional
        True may attend; a float is added to the scaled scores. It lives in HBM and is counted.
    key_padding_mask : bool array (batch, Nk), optional
        True for a real token. Free, and skips tiles.
    block_mask : bool array (ceil(Nq / Br), ceil(Nk / Bc)), optional
        True for a block of scores that is kept; needs `tiles`, the size of its blocks. Free, and
        skips tiles. See `flashsim.layouts`.
    local_window : int, optional
        Query i sees key j if |i div local_window - j div local_window| <= 1: local attention's
        rule, for Nq = Nk. Free, and skips tiles.
    projection : int or (E, F), optional
        For "linformer", how it mixes the Nk keys and values into k: two arrays (k, Nk) in the dtype
        of q, or k for the means of k runs of the real keys, as even as can be; k of Nk at most.
        Padded keys are not mixed in; no other mask can be given. E and F live in HBM, and are
        counted.
    splits : int, optional
        For "split_kv", the parts that the keys are cut into, at most 128; more parts than key tiles
        leave some empty. Default: what the published rule takes on an H200; see
        `flashsim.cost.splits`.
    exp_emulation : (share, degree), optional
        For "flash4", the share of the exponentials that are polynomials of a degree 1 to 5 instead;
        see `flashsim.exp2`. The error is that of `exp2.LARGEST_ERROR`, more than float32's.
    rescale_threshold : float, optional
        For "flash4", by how many powers of two a tile must exceed a row's maximum for the row to be
        rescaled, from 0 (always, as in FlashAttention-2) to 32. Default: 8, the published one. The
        result's `rescales` says how often each row was.
    fp8 : int, optional
        For "flash3-fp8", the rows of Q, K and V that share a scale: those of a block, or from N on
        one scale for the whole array. q is not float64. Q, K and V then take a byte an element in
        HBM; making them of q, k and v is not charged. See `flashsim.fp8`.
    incoherent : bool
        With `fp8`, rotate Q and K by random signs and a Hadamard matrix first.
    cu_seqlens_q, cu_seqlens_k : int array (sequences + 1,), optional
        q (heads, total, d), and k and v, hold several sequences one after the other: the n-th is
        rows cu_seqlens[n] to cu_seqlens[n + 1]. Each attends to itself alone; causal and window are
        aligned in it, and its dropout is that of item n. An empty one has no rows, or no keys. Keys
        default to the lengths of the queries. No array, padding or block mask can be given.
    block_tables, seq_lens : int array (batch, pages of a sequence), (batch,), optional
        For "paged": k and v are pages, (pages, heads, page, d), or (pages, page, d) for q (Nq, d).
        Key n of item b is row n mod page of page block_tables[b, n div page], for n below
        seq_lens[b]; sequences may share pages. What lies beyond is neither read nor counted, and
        the table is free. No array, padding or block mask can be given.
    scale : float, optional
        Default 1 / sqrt(d).
    dropout_p : float
        Probability in [0, 1) that a weight is dropped; see `flashsim.dropout`.
    seed : int
        Of the dropout, below 2^64.
    enable_gqa : bool
        Allow k and v fewer heads than q, a divisor: consecutive query heads share one.
    tiles : (Br, Bc), optional
        Rows of a query and of a key tile, clamped to Nq and Nk. Default: the "strict" rule for the
        budget, or tiles that are fast in NumPy on an unbounded chip.
    sram, sram_bytes : number, optional
        Budget of the chip: in elements (theory) or in bytes at each tile's item size (hardware).
        At most one; with neither the chip is unbounded.
    convention : {"literal", "elided"}
        Whether FlashAttention's initial O, l, m are written and read as printed, or not, as in the
        published kernels.

    Returns
    -------
    Attention

    Raises
    ------
    ValueError, TypeError
        If an argument is unusable; the message names it, its value and what is accepted.
    SramOverflow
        A ValueError and MemoryError: the tiles do not fit in the budget.
    """
    row = ALGORITHMS[checks.choice("algorithm", algorithm, ALGORITHMS)]
    checks.choice("convention", convention, checks.CONVENTIONS)
    limit, limit_bytes = checks.budgets(sram, sram_bytes)
    check_required(
        algorithm, block_mask=block_mask, local_window=local_window, projection=projection,
        splits=splits, block_tables=block_tables, exp_emulation=exp_emulation,
        rescale_threshold=rescale_threshold, fp8=fp8,
    )  # fmt: skip
    problem = checked(
        q, k, v, is_causal=is_causal, causal_align=causal_align, window=window,
        attn_mask=attn_mask, key_padding_mask=key_padding_mask, scale=scale, dropout_p=dropout_p,
        seed=seed, enable_gqa=enable_gqa, block_mask=block_mask, tiles=tiles,
        local_window=local_window, projection=projection,
        splits=splits if "splits" in row.options else 1,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, block_tables=block_tables,
        seq_lens=seq_lens, exp_emulation=exp_emulation, rescale_threshold=rescale_threshold,
        fp8=fp8, incoherent=incoherent,
    )  # fmt: skip
    head, rows = problem.head, problem.q.shape[:-1]
    Br, Bc = _tiles(tiles, row, head, limit, limit_bytes)
    machine = Machine(sram=limit, sram_bytes=limit_bytes, elide=convention == "elided")
    wide = widened(problem.q.dtype)
    output = np.empty((*rows, head.dv), wide if row.wide_output else problem.q.dtype)
    lse = np.empty(rows, wide)
    rescales = np.zeros(rows, np.int64) if "R" in row.arrays else None
    saved = {}
    for at in np.ndindex(*problem.lead):
        mine, mask = problem.rows_at(at), problem.mask(at, machine)
        one = replace(head, mask=mask)
        own = usable(row, (Br, Bc), one)
        arrays = _arrays(machine, row, one, output[mine], wide)
        with np.errstate(all="ignore"):  # NaN and inf in the inputs show in the output
            row.forward(
                *machine.hbm(**problem.inputs(at)).values(),
                *problem.scales(at).values(),
                *arrays.values(),
                Br=own[0],
                Bc=own[1],
                scale=problem.scale,
                mask=mask,
                drop=problem.dropout(at),
                **row.more(one, limit, limit_bytes),
                **problem.paging(at),
            )
            lse[mine] = _logsumexp(arrays)
        if rescales is not None:
            rescales[mine] = arrays["R"]
        reads = row.backward["literal"].reads if row.backward else ()
        saved[at] = {name: _stored(a) for name, a in arrays.items() if name in reads}
        if "O" in saved[at]:  # the caller may change what is returned
            saved[at]["O"] = saved[at]["O"].copy()
    call = _Call(algorithm, convention, problem, (limit, limit_bytes), (Br, Bc), tiles, saved)
    return Attention(
        output=problem.as_given(output.astype(problem.q.dtype, copy=False)),
        lse=problem.as_given(lse),
        traffic=machine.traffic,
        sram_peak_elements=machine.peak_elements,
        sram_peak_bytes=machine.peak_bytes,
        extra_hbm_elements=machine.allocated_elements,
        call=call,
        rescales=None if rescales is None else problem.as_given(rescales),
    )


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:
    """Attention with the signature and rules of PyTorch's function of this name.

    Causal is aligned top-left, `attn_mask` and `is_causal` exclude each other, leading dimensions
    broadcast. Dropout is flashsim's (seed 0), not PyTorch's random stream. Shapes as in
    `attention`; returns the output (..., Nq, dv).

    Source: the documentation of torch.nn.functional.scaled_dot_product_attention.
    """
    if checks.flag("is_causal", is_causal) and attn_mask is not None:
        raise bad("attn_mask", "an array", "None, as is_causal=True")
    given = {"query": query, "key": key, "value": value}
    q, k, v = (as_array(name, x) for name, x in given.items())
    if min(x.ndim for x in (q, k, v)) >= 2:
        grouped = checks.flag("enable_gqa", enable_gqa) and min(x.ndim for x in (q, k, v)) >= 3
        q, k, v = _broadcast(q, k, v, kept=3 if grouped else 2)
        if grouped and k.shape[-3] != v.shape[-3] and k.shape[-3] * v.shape[-3]:
            heads = math.lcm(k.shape[-3], v.shape[-3])
            k, v = (np.repeat(x, heads // x.shape[-3], axis=-3) for x in (k, v))
    try:
        return attention(
            q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal,
            causal_align="top-left", scale=scale, enable_gqa=enable_gqa,
        ).output  # fmt: skip
    except (ValueError, TypeError) as error:
        letter, dot, rest = str(error).partition(".")
        names = dict(zip("qkv", given, strict=True))
        if letter not in names:
            raise
        raise type(error)(names[letter] + dot + rest) from None


def _broadcast(*arrays: Array, kept: int) -> tuple[Array, ...]:
    """Arrays with common leading dimensions, but for the last `kept`, if these broadcast."""
    try:
        lead = np.broadcast_shapes(*(x.shape[:-kept] for x in arrays))
    except ValueError:
        return arrays  # attention names the argument that does not fit
    return tuple(np.broadcast_to(x, (*lead, *x.shape[-kept:])) for x in arrays)


def _tiles(
    tiles: Any, row: Algorithm | Backward, head: Head, sram: float, sram_bytes: float
) -> tuple[int, int]:
    if tiles is None:
        return default_tiles(row, head, sram, sram_bytes)
    return usable(row, checks.pair_of_tiles(tiles), head)


def _shape(
    head: Head, name: str, shapes: Mapping[str, tuple[str, ...]] = SHAPES
) -> tuple[int, ...]:
    return tuple(head.sizes[symbol] for symbol in shapes.get(name, SHAPES[name]))


def _arrays(
    machine: Machine, row: Algorithm, head: Head, output: Array, wide: np.dtype[Any]
) -> dict[str, Any]:
    """What one head's run writes, in the order of the algorithm's signature; NaN until written."""
    arrays: dict[str, Any] = {}
    for name in row.arrays:
        shape = _shape(head, name, row.shapes)
        if name == "O":
            output.fill(np.nan)
            arrays[name] = machine.hbm(O=output)["O"]
        elif name in row.uncharged:
            arrays[name] = np.full(shape, np.nan, wide)
        else:
            dtype = np.dtype(bool) if name in BITS else wide
            arrays[name] = machine.allocate(name, shape, dtype)
    return arrays


def _stored(A: Any) -> Array:
    """What lies in HBM under A, an Hbm array or a plain one; a look that is not counted."""
    return np.asarray(A.data if isinstance(A, Hbm) else A)


def _logsumexp(arrays: dict[str, Any]) -> Array:
    """L, or what FlashAttention's statistics say it is."""
    if "L" in arrays:
        return _stored(arrays["L"])
    m, l = _stored(arrays["m"]), _stored(arrays["l"])
    return np.asarray(shift(m) + log(l))
