"""The front door: checks arguments, walks batches and heads, runs an algorithm, returns counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import checks
from .algorithms import ALGORITHMS, SHAPES, Algorithm
from .checks import bad, bad_type
from .cost.counts import Head
from .cost.tiles import clamped, default_tiles
from .dropout import Dropout
from .masks import Mask, band
from .memory import Hbm, Machine, Traffic, widened
from .online_softmax import log, shift

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
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
    algorithm : str
        What ran.
    tiles : (int, int)
        The (Br, Bc) it ran with.
    """

    output: Array
    lse: Array
    traffic: Traffic
    sram_peak_elements: int
    sram_peak_bytes: int
    extra_hbm_elements: int
    algorithm: str
    tiles: tuple[int, int]


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
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    enable_gqa: bool = False,
    tiles: tuple[int, int] | None = None,
    sram: float | None = None,
    sram_bytes: float | None = None,
    convention: str = "literal",
) -> Attention:
    """Exact attention by a tiled algorithm whose memory traffic is counted.

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
    problem = checked(
        q, k, v, is_causal=is_causal, causal_align=causal_align, window=window,
        attn_mask=attn_mask, key_padding_mask=key_padding_mask, scale=scale, dropout_p=dropout_p,
        seed=seed, enable_gqa=enable_gqa,
    )  # fmt: skip
    head, lead = problem.head, problem.q.shape[:-2]
    Br, Bc = _tiles(tiles, row, head, limit, limit_bytes)
    more = row.more(head, limit, limit_bytes)
    machine = Machine(sram=limit, sram_bytes=limit_bytes, elide=convention == "elided")
    wide = widened(problem.q.dtype)
    output = np.empty((*lead, head.Nq, head.dv), wide if row.wide_output else problem.q.dtype)
    lse = np.empty((*lead, head.Nq), wide)
    for at in np.ndindex(*lead):
        arrays = _arrays(machine, row, head, output[at], wide)
        with np.errstate(all="ignore"):  # NaN and inf in the inputs show in the output
            row.forward(
                *machine.hbm(**problem.inputs(at)).values(),
                *arrays.values(),
                Br=Br,
                Bc=Bc,
                scale=problem.scale,
                mask=problem.mask(at, machine),
                drop=problem.dropout(at),
                **more,
            )
            lse[at] = _logsumexp(arrays)
    return Attention(
        output=problem.as_given(output.astype(problem.q.dtype, copy=False)),
        lse=problem.as_given(lse),
        traffic=machine.traffic,
        sram_peak_elements=machine.peak_elements,
        sram_peak_bytes=machine.peak_bytes,
        extra_hbm_elements=machine.allocated_elements,
        algorithm=algorithm,
        tiles=(Br, Bc),
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
    if is_causal and attn_mask is not None:
        raise bad("attn_mask", "an array", "None, as is_causal=True")
    query, key, value = (np.asarray(x) for x in (query, key, value))
    if not enable_gqa and min(x.ndim for x in (query, key, value)) >= 2:
        try:
            lead = np.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))
        except ValueError:
            lead = query.shape[:-2]  # attention names the argument that does not fit
        else:
            query, key, value = (
                np.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (query, key, value)
            )
    return attention(
        query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal,
        causal_align="top-left", scale=scale, enable_gqa=enable_gqa,
    ).output  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """Checked inputs, (*batch, heads, N, d), whatever the algorithm."""

    q: Array
    k: Array
    v: Array
    group: int  # query heads that share a key head
    array: Array | None  # the mask, (*batch, heads, Nq or 1, Nk or 1)
    real: Array | None  # (*batch, Nk)
    lo: int
    hi: int
    scale: float
    p: float
    seed: int
    alone: bool  # q came without a heads axis

    def as_given(self, x: Array) -> Array:
        """x (*batch, heads, ...) with the leading dimensions that q came with."""
        return np.asarray(x[0] if self.alone else x)

    @property
    def head(self) -> Head:
        """The sizes that all heads share; its mask has the array's shape and no rules."""
        Nq, (Nk, dv) = self.q.shape[-2], self.v.shape[-2:]
        first = None if self.array is None else np.empty(self.array.shape[-2:], self.array.dtype)
        wide = widened(self.q.dtype)
        return Head(Mask(Nq, Nk, array=first), self.q.shape[-1], dv, self.q.itemsize, wide.itemsize)

    def inputs(self, at: tuple[int, ...]) -> dict[str, Array]:
        """Q, K and V of one query head."""
        shared = (*at[:-1], at[-1] // self.group)
        return {"Q": self.q[at], "K": self.k[shared], "V": self.v[shared]}

    def mask(self, at: tuple[int, ...], machine: Machine | None = None) -> Mask:
        """The mask of one query head; with a machine, its array lives in that machine's HBM."""
        array: Any = None if self.array is None else self.array[at]
        if machine is not None and array is not None:
            array = machine.hbm(mask=array)["mask"]
        keys = None if self.real is None else self.real[at[:-1]]
        Nq, Nk = self.q.shape[-2], self.k.shape[-2]
        return Mask(Nq, Nk, lo=self.lo, hi=self.hi, keys=keys, array=array)

    def dropout(self, at: tuple[int, ...]) -> Dropout:
        """The dropout of one query head."""
        batch = int(np.ravel_multi_index(at[:-1], self.q.shape[:-3])) if at[:-1] else 0
        return Dropout(self.p, self.seed, batch, at[-1])


def checked(
    q: Any, k: Any, v: Any, *, is_causal: Any = False, causal_align: Any = "bottom-right",
    window: Any = None, attn_mask: Any = None, key_padding_mask: Any = None, scale: Any = None,
    dropout_p: Any = 0.0, seed: Any = 0, enable_gqa: Any = False,
) -> Problem:  # fmt: skip
    """Check everything that says what is to be computed, and bring it into one form."""
    q, k, v = _floats("q", q), _floats("k", k), _floats("v", v)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise bad_type(f"{name}.dtype", str(x.dtype), f"{q.dtype}, the dtype of q")
        if x.ndim != q.ndim:
            raise bad(f"{name}.shape", x.shape, f"{q.ndim} dimensions, as q has: q.shape={q.shape}")
    alone = q.ndim == 2
    if alone:
        q, k, v = q[None], k[None], v[None]
    (*batch, H, Nq, d), Nk = q.shape, k.shape[-2]
    shared = k.shape[-3]
    if k.shape != (*batch, shared, Nk, d):
        raise bad("k.shape", k.shape, f"{(*batch, H, Nk, d)}, to go with q.shape={q.shape}")
    if v.shape[:-1] != k.shape[:-1]:
        raise bad("v.shape", v.shape, f"{k.shape[:-1]} and a width, to go with k.shape={k.shape}")
    if shared != H and not checks.flag("enable_gqa", enable_gqa):
        raise bad("k.shape", k.shape, f"{H} heads, as q has; fewer only with enable_gqa=True")
    if shared != H and (shared == 0 or H % shared):
        raise bad("k.shape", k.shape, f"a number of heads that divides the {H} of q")

    window = checks.window_sides(window)
    checks.choice("causal_align", causal_align, checks.ALIGNMENTS)
    lo, hi = band(
        Nq, Nk, is_causal=checks.flag("is_causal", is_causal), causal_align=causal_align,
        window=window,
    )  # fmt: skip
    p = checks.number("dropout_p", dropout_p, "a probability in [0, 1)")
    if not 0 <= p < 1:
        raise bad("dropout_p", dropout_p, "a probability in [0, 1)")
    return Problem(
        q, k, v,
        group=H // shared if shared else 1,
        array=_mask_array(attn_mask, (*batch, H, Nq, Nk), widened(q.dtype)),
        real=_padding(key_padding_mask, tuple(batch), Nk),
        lo=lo,
        hi=hi,
        scale=checks.number(
            "scale", d**-0.5 if scale is None else scale, "a finite number, or None for 1/sqrt(d)"
        ),
        p=p,
        seed=checks.integer("seed", seed, 0, 2**64),
        alone=alone,
    )  # fmt: skip


def _floats(name: str, given: Any) -> Array:
    x: Array = np.asarray(given)
    if x.dtype.name not in checks.FLOATS:
        raise bad_type(f"{name}.dtype", str(x.dtype), "one of " + ", ".join(checks.FLOATS))
    if x.ndim < 2:
        raise bad(f"{name}.shape", x.shape, "at least two dimensions, (..., N, d)")
    if x.shape[-1] == 0:
        raise bad(f"{name}.shape", x.shape, "a width of at least 1 in the last dimension")
    return x


def _mask_array(attn_mask: Any, shape: tuple[int, ...], wide: np.dtype[Any]) -> Array | None:
    """attn_mask as (*batch, heads, Nq or 1, Nk or 1)."""
    if attn_mask is None:
        return None
    array = np.asarray(attn_mask)
    if array.dtype != bool and (
        array.dtype.name not in checks.FLOATS or np.promote_types(array.dtype, wide) != wide
    ):
        accepted = "bool, or a float no wider than the scores, " + str(wide)
        raise bad_type("attn_mask.dtype", str(array.dtype), accepted)
    array = array.reshape((1,) * (2 - array.ndim) + array.shape)
    try:
        fits = np.broadcast_shapes(array.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise bad("attn_mask.shape", np.shape(attn_mask), f"what broadcasts to {shape}")
    return np.broadcast_to(array, (*shape[:-2], *array.shape[-2:]))


def _padding(key_padding_mask: Any, batch: tuple[int, ...], Nk: int) -> Array | None:
    """key_padding_mask as (*batch, Nk)."""
    if key_padding_mask is None:
        return None
    real = np.asarray(key_padding_mask)
    if real.dtype != bool:
        raise bad_type("key_padding_mask.dtype", str(real.dtype), "bool, True for a real token")
    if real.shape != (*batch, Nk) and (batch or real.shape != (1, Nk)):
        raise bad("key_padding_mask.shape", real.shape, f"{(*batch, Nk)}, the batch and the keys")
    return real.reshape(*batch, Nk)


def _tiles(
    tiles: Any, row: Algorithm, head: Head, sram: float, sram_bytes: float
) -> tuple[int, int]:
    if tiles is None:
        return default_tiles(row, head, sram, sram_bytes)
    return clamped(checks.pair_of_tiles(tiles), head.Nq, head.Nk)


def _arrays(
    machine: Machine, row: Algorithm, head: Head, output: Array, wide: np.dtype[Any]
) -> dict[str, Any]:
    """What one head's run writes, in the order of the algorithm's signature; NaN until written."""
    sizes = {"Nq": head.Nq, "Nk": head.Nk, "dv": head.dv}
    arrays: dict[str, Any] = {}
    for name in row.arrays:
        shape = tuple(sizes[symbol] for symbol in SHAPES[name])
        if name == "O":
            output.fill(np.nan)
            arrays[name] = machine.hbm(O=output)["O"]
        elif name in row.uncharged:
            arrays[name] = np.full(shape, np.nan, wide)
        else:
            arrays[name] = machine.allocate(name, shape, wide)
    return arrays


def _logsumexp(arrays: dict[str, Any]) -> Array:
    """L, or what FlashAttention's statistics say it is; this look at HBM is not counted."""
    if "L" in arrays:
        L = arrays["L"]
        return np.asarray(L.data if isinstance(L, Hbm) else L)
    m, l = arrays["m"].data, arrays["l"].data
    return np.asarray(shift(m) + log(l))
