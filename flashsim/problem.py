"""What is to be computed: q, k, v, masks, scale and dropout, checked and brought into one form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise, starmap
from typing import Any

import numpy as np

from . import checks
from .checks import bad, bad_type
from .cost.counts import THRESHOLD, Head
from .cost.splits import MOST_SPLITS, usual_splits
from .dropout import Dropout
from .exp2 import checked_emulation
from .fp8 import quantised, rotation
from .masks import Layout, Mask, band
from .memory import Machine, widened

Array = np.ndarray[Any, Any]

LARGEST_THRESHOLD = 32  # powers of two: far below float32's 127
LARGEST_WINDOWS = 2**12  # of local attention: a layout of 2^24 blocks


@dataclass(frozen=True)
class Sequence:
    """One of several packed sequences: its rows of q, and of k and v; lo and hi as in `Mask`."""

    rows: slice
    keys: slice
    lo: int
    hi: int

    @property
    def lengths(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.rows.stop - self.rows.start, self.keys.stop - self.keys.start


@dataclass(frozen=True)
class Table:
    """The pages of one sequence, in its order, and how many keys they hold; lo, hi as in `Mask`."""

    pages: Array
    length: int
    lo: int
    hi: int


@dataclass(frozen=True)
class Problem:
    """Checked inputs, (*batch, heads, N, d), whatever the algorithm.

    Packed sequences lie one after the other in (heads, N, d). `at` is (*batch, head), or (sequence,
    head) if there are any.
    """

    q: Array
    k: Array
    v: Array
    group: int  # query heads that share a key head
    array: Array | None  # the mask, (*batch, heads, Nq or 1, Nk or 1)
    array_shape: tuple[int, ...]  # as it was given, () without one
    real: Array | None  # (*batch, Nk)
    layout: Layout | None
    lo: int
    hi: int
    scale: float
    p: float
    seed: int
    alone: bool  # q came without a heads axis
    projection: tuple[Array, Array] | None = None  # Linformer's E and F, (*batch, k, Nk)
    splits: int = 1  # parts of the keys, each with a partial result
    sequences: tuple[Sequence, ...] | None = None
    tables: tuple[Table, ...] | None = None  # of each item; k and v are then all pages, for each
    page: int = 0  # rows of a page
    fp8: int | None = None  # rows that share a scale
    incoherent: bool = True  # in FP8, whether Q and K are rotated
    emulation: tuple[float, int] | None = None  # share and degree of polynomial exponentials
    threshold: float | None = None  # powers of two that m may lag behind; None: the published ones

    def as_given(self, x: Array) -> Array:
        """x (*batch, heads, ...) with the leading dimensions that q came with."""
        return np.asarray(x[0] if self.alone else x)

    @property
    def head(self) -> Head:
        """The sizes that all heads share; its mask has the array's shape and the layout alone."""
        first = None if self.array is None else np.empty(self.array.shape[-2:], self.array.dtype)
        lengths = self.lengths if self.sequences is None else longest(self.sequences)
        if self.tables is not None:
            lengths = self.q.shape[-2], max((table.length for table in self.tables), default=0)
        wide = widened(self.q.dtype)
        return Head(
            Mask(*lengths, layout=self.layout, array=first),
            self.q.shape[-1],
            self.v.shape[-1],
            self.q.itemsize,
            wide.itemsize,
            self.group,
            unmixed=0 if self.projection is None else self.k.shape[-2],
            splits=self.splits,
            emulation=self.emulation,
            threshold=THRESHOLD if self.threshold is None else self.threshold,
        )

    def inputs(self, at: tuple[int, ...]) -> dict[str, Array]:
        """Q, K and V of one query head; and E and F, where Linformer mixes keys."""
        keys = self.keys_at(at)
        found = {"Q": self.q[self.rows_at(at)], "K": self.k[keys], "V": self.v[keys]}
        if self.projection is not None:
            found |= {"E": self.projection[0][at[:-1]], "F": self.projection[1][at[:-1]]}
        if self.fp8 is not None:
            return {
                name: values
                for name, (values, _) in self._quantised(found, self._real_at(at)).items()
            }
        return found

    def scales(self, at: tuple[int, ...]) -> dict[str, Array]:
        """In FP8, the scale of each row of Q, K and V of one query head; otherwise nothing."""
        if self.fp8 is None:
            return {}
        keys = self.keys_at(at)
        given = {"qs": self.q[self.rows_at(at)], "ks": self.k[keys], "vs": self.v[keys]}
        return {
            name: scale for name, (_, scale) in self._quantised(given, self._real_at(at)).items()
        }

    def _quantised(
        self, given: dict[str, Array], real: Array | None
    ) -> dict[str, tuple[Array, Array]]:
        """e4m3 values and row scales of (Q, K, V); padded keys are 0, and count for no scale."""
        assert self.fp8 is not None
        Q, K, V = (x.astype(widened(x.dtype)) for x in given.values())
        if real is not None:
            K[~real], V[~real] = 0, 0
        if self.incoherent:
            R = rotation(Q.shape[-1]).astype(Q.dtype)
            Q, K = Q @ R, K @ R
        return {name: quantised(x, self.fp8) for name, x in zip(given, (Q, K, V), strict=True)}

    def _real_at(self, at: tuple[int, ...]) -> Array | None:
        """Which keys of one query head are no padding; None: all."""
        return None if self.real is None else self.real[at[:-1]]

    @property
    def lead(self) -> tuple[int, ...]:
        """How many there are of what `at` counts: (*batch, heads), or (sequences, heads)."""
        lead = self.q.shape[:-2]
        return lead if self.sequences is None else (len(self.sequences), *lead)

    def rows_at(self, at: tuple[int, ...]) -> tuple[Any, ...]:
        """Where q, and what has its rows, keeps those of one query head."""
        return at if self.sequences is None else (at[1], self.sequences[at[0]].rows)

    def keys_at(self, at: tuple[int, ...]) -> tuple[Any, ...]:
        """Where k and v keep the key head that a query head reads."""
        shared = at[-1] // self.group
        if self.sequences is None:
            return (*at[:-1], shared)
        return shared, self.sequences[at[0]].keys

    def mask(
        self,
        at: tuple[int, ...],
        machine: Machine | None = None,
        d_array: Array | None = None,
    ) -> Mask:
        """The mask of one query head; with a machine, its arrays live in that machine's HBM.

        d_array: gradient of the whole mask, in the shape it was given.
        """
        array: Any = None if self.array is None else self.array[at]
        d_mine: Any = None if d_array is None else self.own_part(d_array, at)
        if machine is not None and array is not None:
            array = machine.hbm(mask=array)["mask"]
            d_mine = None if d_mine is None else machine.hbm(dmask=d_mine)["dmask"]
        if self.sequences is not None:
            mine = self.sequences[at[0]]
            return Mask(*mine.lengths, lo=mine.lo, hi=mine.hi)
        if self.tables is not None:
            table = self.tables[self._item(at)]
            return Mask(self.q.shape[-2], table.length, lo=table.lo, hi=table.hi)
        return Mask(
            *self.lengths,
            lo=self.lo,
            hi=self.hi,
            keys=self._real_at(at),
            layout=self.layout,
            array=array,
            d_array=d_mine,
            d_shared=self._mask_is_shared,
        )

    @property
    def lengths(self) -> tuple[int, int]:
        """Queries, and the keys that they meet: Nq and Nk, or Linformer's k."""
        keys = self.k if self.projection is None else self.projection[0]
        return self.q.shape[-2], keys.shape[-2]

    @property
    def d_mask(self) -> str:
        """What a backward pass does with the gradient of the array mask; see `Head`."""
        if self.array is None:
            return ""
        own = self.array.shape[-2:] == self.lengths and not self._mask_is_shared
        return "written" if own else "accumulated"

    @property
    def _mask_is_shared(self) -> bool:
        """Whether several heads have the same part of the array."""
        heads: int = math.prod(self.q.shape[:-2])
        return self.array is not None and math.prod(self._lead_of_mask()) < heads

    def _lead_of_mask(self) -> tuple[int, ...]:
        lead = self.array_shape[:-2]
        return (1,) * (self.q.ndim - 2 - len(lead)) + lead

    def own_part(self, d_array: Array, at: tuple[int, ...]) -> Array:
        """The part of a gradient in the mask's given shape that one head adds to: a view."""
        lead = self._lead_of_mask()
        whole = d_array.reshape(*lead, *d_array.shape[-2:])
        mine = tuple(n if size > 1 else 0 for n, size in zip(at, lead, strict=True))
        return np.asarray(whole[mine])

    @property
    def gradient_shape(self) -> tuple[int, ...]:
        """The shape of the array mask's gradient while it is worked on: at least two dimensions."""
        return (1,) * (2 - len(self.array_shape)) + self.array_shape

    def output_gradient(self, do: Any) -> Array:
        """do, checked, as (*batch, heads, Nq, dv)."""
        given = as_array("do", do)
        if given.dtype != self.q.dtype:
            raise bad_type("do.dtype", str(given.dtype), f"{self.q.dtype}, the dtype of the output")
        shape = (*self.q.shape[:-1], self.v.shape[-1])
        shape = shape[1:] if self.alone else shape
        if given.shape != shape:
            raise bad("do.shape", given.shape, f"{shape}, the shape of the output")
        return given[None] if self.alone else given

    def dropout(self, at: tuple[int, ...]) -> Dropout:
        """The dropout of one query head."""
        return Dropout(self.p, self.seed, self._item(at), at[-1])

    def paging(self, at: tuple[int, ...]) -> dict[str, Any]:
        """Where there are pages, the table of one query head's sequence, and a page's rows."""
        if self.tables is None:
            return {}
        return {"table": self.tables[self._item(at)].pages, "page": self.page}

    def _item(self, at: tuple[int, ...]) -> int:
        """Which item of the flattened batch it is."""
        return int(np.ravel_multi_index(at[:-1], self.lead[:-1])) if at[:-1] else 0


def checked(
    q: Any, k: Any, v: Any, *, is_causal: Any = False, causal_align: Any = "bottom-right",
    window: Any = None, attn_mask: Any = None, key_padding_mask: Any = None, scale: Any = None,
    dropout_p: Any = 0.0, seed: Any = 0, enable_gqa: Any = False, block_mask: Any = None,
    tiles: Any = None, local_window: Any = None, projection: Any = None, splits: Any = 1,
    cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, block_tables: Any = None,
    seq_lens: Any = None, exp_emulation: Any = None, rescale_threshold: Any = None,
    fp8: Any = None, incoherent: Any = True,
) -> Problem:  # fmt: skip
    """Check everything that says what is to be computed, and bring it into one form."""
    q, k, v = as_floats("q", q), as_floats("k", k), as_floats("v", v)
    pages = page = 0
    given = k.shape  # messages name the shape that k came with, pages or not
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise bad_type(f"{name}.dtype", str(x.dtype), f"{q.dtype}, the dtype of q")
    if block_tables is not None:
        pages, page = _pages(q, k, v)
        k, v = _pooled(k, q), _pooled(v, q)
    for name, x in (("k", k), ("v", v)):
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
        raise bad("k.shape", given, f"{H} heads, as q has; fewer only with enable_gqa=True")
    if shared != H and (shared == 0 or H % shared):
        raise bad("k.shape", given, f"a number of heads that divides the {H} of q")

    rules: dict[str, Any] = {
        "is_causal": checks.flag("is_causal", is_causal),
        "causal_align": checks.choice("causal_align", causal_align, checks.ALIGNMENTS),
        "window": checks.window_sides(window),
    }
    lo, hi = band(Nq, Nk, **rules)
    tables = None
    if block_tables is not None:
        none_beside(
            "block_tables", attn_mask=attn_mask, key_padding_mask=key_padding_mask,
            block_mask=block_mask, local_window=local_window, projection=projection,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        )  # fmt: skip
        of = found_pages(block_tables, seq_lens, math.prod(batch), pages, page)
        tables = tuple(Table(own, length, *band(Nq, length, **rules)) for own, length in of)
    elif seq_lens is not None:
        raise bad("seq_lens", "given", "None without block_tables")
    sequences = None
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        if batch:
            raise bad("q.shape", q.shape, "(heads, N, d) or (N, d) with cu_seqlens_q")
        none_beside(
            "cu_seqlens_q", attn_mask=attn_mask, key_padding_mask=key_padding_mask,
            block_mask=block_mask, local_window=local_window, projection=projection,
        )  # fmt: skip
        sequences = packed(cu_seqlens_q, cu_seqlens_k, Nq, Nk, rules)
    p = checks.number("dropout_p", dropout_p, "a probability in [0, 1)")
    if not 0 <= p < 1:
        raise bad("dropout_p", dropout_p, "a probability in [0, 1)")
    real = _padding(key_padding_mask, tuple(batch), Nk)
    layout = block_layout(block_mask, tiles, Nq, Nk)
    if local_window is not None:
        layout = local_layout(local_window, Nq, Nk, block_mask)
    mixing = None
    if projection is not None:
        others = {
            "is_causal": is_causal or None, "window": window, "attn_mask": attn_mask,
            "block_mask": block_mask, "local_window": local_window,
        }  # fmt: skip
        for name, value in others.items():
            if value is not None:
                raise bad(name, "given", "none beside projection, which mixes keys of all places")
        mixing = _projection(projection, tuple(batch), Nk, real, q.dtype)
        real = (mixing[0] != 0).any(axis=-1)
    return Problem(
        q, k, v,
        group=H // shared if shared else 1,
        array=_mask_array(attn_mask, (*batch, H, Nq, Nk), widened(q.dtype)),
        array_shape=() if attn_mask is None else np.shape(attn_mask),
        real=real,
        layout=layout,
        lo=lo,
        hi=hi,
        scale=_scale(d**-0.5 if scale is None else scale, widened(q.dtype)),
        p=p,
        seed=checks.integer("seed", seed, 0, 2**64),
        alone=alone,
        projection=mixing,
        splits=_parts(splits, math.prod((*batch, H)), Nq, Nk, d, sequences),
        sequences=sequences,
        tables=tables,
        page=page,
        fp8=rows_of_a_scale(fp8, q.dtype),
        incoherent=_rotates(incoherent, fp8),
        emulation=checked_emulation(exp_emulation),
        threshold=_threshold(rescale_threshold),
    )  # fmt: skip


def rows_of_a_scale(fp8: Any, dtype: np.dtype[Any]) -> int | None:
    """`fp8`, checked, for inputs of a dtype."""
    if fp8 is None:
        return None
    if dtype == np.float64:
        raise bad_type("dtype", "float64", "float16, bfloat16 or float32 with fp8")
    return checks.integer("fp8", fp8, 1)


def _rotates(incoherent: Any, fp8: Any) -> bool:
    if not checks.flag("incoherent", incoherent) and fp8 is None:
        raise bad("incoherent", incoherent, "True, as fp8 is not given")
    return bool(incoherent)


def _threshold(given: Any) -> float | None:
    if given is None:
        return None
    accepted = f"powers of two from 0 to {LARGEST_THRESHOLD}"
    if not 0 <= checks.number("rescale_threshold", given, accepted) <= LARGEST_THRESHOLD:
        raise bad("rescale_threshold", given, accepted)
    return float(given)


def longest(sequences: tuple[Sequence, ...]) -> tuple[int, int]:
    """The most queries, and the most keys, of any sequence."""
    queries, keys = ([s.lengths[side] for s in sequences] for side in (0, 1))
    return max(queries, default=0), max(keys, default=0)


def none_beside(what: str, **others: Any) -> None:
    """Refuse arguments that have no meaning beside another."""
    for name, value in others.items():
        if value is not None:
            raise bad(name, "given", f"None, as {what} is given")


def packed(
    cu_seqlens_q: Any, cu_seqlens_k: Any, Nq: int, Nk: int, rules: dict[str, Any]
) -> tuple[Sequence, ...]:
    """The sequences that cumulative lengths, of queries and of keys, cut Nq and Nk rows into.

    rules: is_causal, causal_align and window, as `band` takes them; they hold in each sequence.

    Raises
    ------
    ValueError, TypeError
        If they are no integers that rise from 0 to the rows there are, or not equally many.
    """
    if cu_seqlens_q is None:
        raise bad("cu_seqlens_q", None, "cumulative lengths, as cu_seqlens_k is given")
    q = cumulative("cu_seqlens_q", cu_seqlens_q, Nq, "q")
    if cu_seqlens_k is None:
        if Nk != Nq:
            raise bad("cu_seqlens_k", None, f"cumulative lengths, as k has {Nk} rows and q {Nq}")
        k = q
    else:
        k = cumulative("cu_seqlens_k", cu_seqlens_k, Nk, "k")
    if len(k) != len(q):
        raise bad("cu_seqlens_k", cu_seqlens_k, f"{len(q)} numbers, as cu_seqlens_q has")
    return tuple(
        Sequence(rows, keys, *band(rows.stop - rows.start, keys.stop - keys.start, **rules))
        for rows, keys in zip(starmap(slice, pairwise(q)), starmap(slice, pairwise(k)), strict=True)
    )


def cumulative(name: str, given: Any, rows: int, of: str) -> list[int]:
    """Cumulative lengths, checked: integers that rise from 0 to the number of rows."""
    ends = as_array(name, given)
    if ends.ndim != 1 or len(ends) == 0:
        raise bad(f"{name}.shape", ends.shape, "(sequences + 1,)")
    if ends.dtype.kind not in "iu":
        raise bad_type(f"{name}.dtype", str(ends.dtype), "an integer type")
    found: list[int] = ends.tolist()
    if found[0] != 0 or found[-1] != rows:
        raise bad(name, given, f"from 0 to {rows}, the rows of {of}")
    for n, (a, b) in enumerate(pairwise(found)):
        if b < a:
            raise bad(f"{name}[{n + 1}]", b, f"at least {a}, where the sequence before ends")
    return found


def _pages(q: Array, k: Array, v: Array) -> tuple[int, int]:
    """How many pages k and v are, and the rows of one."""
    shape = "(pages, page, d)" if q.ndim == 2 else "(pages, heads, page, d)"
    if k.ndim != min(q.ndim + 1, 4) or k.shape[-1] != q.shape[-1]:
        raise bad("k.shape", k.shape, f"{shape} with d={q.shape[-1]}, as block_tables is given")
    if v.shape[:-1] != k.shape[:-1]:
        raise bad("v.shape", v.shape, f"{k.shape[:-1]} and a width, to go with k.shape={k.shape}")
    return k.shape[0], k.shape[-2]


def _pooled(x: Array, q: Array) -> Array:
    """Pages (pages, heads, page, width), or without heads, as rows that any item of q may read."""
    rows = np.moveaxis(x, 0, -3)
    rows = rows.reshape(*rows.shape[:-3], rows.shape[-3] * rows.shape[-2], x.shape[-1])
    return np.broadcast_to(rows, (*q.shape[:-3], *rows.shape))


def found_pages(
    block_tables: Any, seq_lens: Any, batch: int, pages: int, page: int
) -> list[tuple[Array, int]]:
    """The pages that each item's keys lie in, and how many keys it has.

    What a table holds beyond the pages that a length needs does not matter.

    Raises
    ------
    ValueError, TypeError
        If the tables or the lengths are not one for each item, a length is more than the pages of a
        table hold, a page is none of those there are, or one comes twice in a sequence.
    """
    tables, lengths = as_array("block_tables", block_tables), as_array("seq_lens", seq_lens)
    if seq_lens is None:
        raise bad("seq_lens", None, "the keys of each sequence, as block_tables is given")
    for name, x, ndim, shape in (
        ("block_tables", tables, 2, f"({batch}, pages of a sequence)"),
        ("seq_lens", lengths, 1, f"({batch},)"),
    ):
        if x.ndim != ndim or len(x) != batch:
            raise bad(f"{name}.shape", x.shape, f"{shape}, a row for each sequence")
        if x.dtype.kind not in "iu" and x.size:
            raise bad_type(f"{name}.dtype", str(x.dtype), "an integer type")
    found = []
    for b, (table, length) in enumerate(zip(tables, lengths.tolist(), strict=True)):
        if not 0 <= length <= len(table) * page:
            room = f"from 0 to {len(table) * page}: {len(table)} pages of {page} rows"
            raise bad(f"seq_lens[{b}]", length, room)
        own = table[: -(-length // max(1, page))]
        for n in np.flatnonzero((own < 0) | (own >= pages)):
            raise bad(f"block_tables[{b}, {n}]", int(own[n]), f"a page from 0 to {pages - 1}")
        if len(set(own.tolist())) < len(own):
            raise bad(f"block_tables[{b}]", own.tolist(), "each page once in a sequence")
        found.append((own.astype(np.int64), length))
    return found


def _parts(
    splits: Any, heads: int, Nq: int, Nk: int, d: int, sequences: tuple[Sequence, ...] | None
) -> int:
    """`parts_of_keys`, for the longest of several sequences."""
    if sequences is not None:
        Nq, Nk = longest(sequences)
        heads *= len(sequences)
    return parts_of_keys(splits, heads, Nq, Nk, d)


def parts_of_keys(splits: Any, heads: int, Nq: int, Nk: int, d: int) -> int:
    """`splits`, checked, or what the published rule takes for such a problem where it is None."""
    if splits is None:
        return usual_splits(heads, Nq, Nk, d)
    return checks.integer("splits", splits, 1, MOST_SPLITS + 1)


def _scale(scale: Any, wide: np.dtype[Any]) -> float:
    largest = float(np.finfo(wide).max)
    accepted = f"a number of at most {largest:.3g} in size, or None for 1/sqrt(d)"
    value = checks.number("scale", scale, accepted)
    if abs(value) > largest:
        raise bad("scale", scale, accepted)
    return value


def as_array(name: str, given: Any) -> Array:
    """What NumPy makes of it; a masked array would lose its mask, and is refused."""
    if isinstance(given, np.ma.MaskedArray):
        raise bad_type(name, "a masked array", "a plain array; masks are arguments of their own")
    try:
        return np.asarray(given)
    except ValueError as error:
        raise bad(name, "what NumPy cannot make an array of", f"an array ({error})") from error


def as_floats(name: str, given: Any) -> Array:
    """An array (..., N, width) of a float type that attention takes."""
    x = as_array(name, given)
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
    array = as_array("attn_mask", attn_mask)
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
    real = as_array("key_padding_mask", key_padding_mask)
    if real.dtype != bool:
        raise bad_type("key_padding_mask.dtype", str(real.dtype), "bool, True for a real token")
    if real.shape != (*batch, Nk) and (batch or real.shape != (1, Nk)):
        what = "the batch and the keys" if batch else "the keys alone: q has no batch dimension"
        raise bad("key_padding_mask.shape", real.shape, f"{(*batch, Nk)}, {what}")
    return real.reshape(*batch, Nk)


def block_layout(block_mask: Any, tiles: Any, Nq: int, Nk: int) -> Layout | None:
    """block_mask over blocks of the size of `tiles`, checked."""
    if block_mask is None:
        return None
    keep = as_array("block_mask", block_mask)
    if keep.dtype != bool:
        raise bad_type("block_mask.dtype", str(keep.dtype), "bool, True for a block that is kept")
    if tiles is None:
        raise bad("tiles", tiles, "(Br, Bc), the size of the blocks of block_mask")
    Br, Bc = checks.clamped(checks.pair_of_tiles(tiles), Nq, Nk)
    shape = -(-Nq // Br), -(-Nk // Bc)
    if keep.shape != shape:
        raise bad("block_mask.shape", keep.shape, f"{shape}, the blocks of {Br} x {Bc} scores")
    return Layout(keep, Br, Bc)


def local_layout(local_window: Any, Nq: int, Nk: int, block_mask: Any = None) -> Layout:
    """Local attention's rule as a layout: of blocks of local_window scores, those at the diagonal.

    Raises
    ------
    ValueError, TypeError
        If the lengths differ, there is a block mask too, or the window is no integer that cuts the
        queries into at most 4096.
    """
    w = checks.integer("local_window", local_window, 1)
    if block_mask is not None:
        raise bad("local_window", w, "None, as block_mask is given")
    if Nq != Nk:
        raise bad("local_window", w, f"None, as there are {Nq} queries and {Nk} keys")
    n = -(-Nq // w)
    if n > LARGEST_WINDOWS:
        raise bad("local_window", w, f"at least {-(-Nq // LARGEST_WINDOWS)} at {Nq} queries")
    place = np.arange(n)
    return Layout(abs(place[:, None] - place) <= 1, w, w)


def _projection(
    given: Any, batch: tuple[int, ...], Nk: int, real: Array | None, dtype: np.dtype[Any]
) -> tuple[Array, Array]:
    """Linformer's E and F for each item, (*batch, k, Nk), 0 at padded keys."""
    real = np.ones((*batch, Nk), bool) if real is None else real
    if not isinstance(given, (tuple, list)):
        k = checks.integer("projection", given, 1, max(1, Nk) + 1)
        E = np.empty((*batch, k, Nk), dtype)
        for item in np.ndindex(*batch):
            E[item] = means(k, real[item])
        return E, E
    if len(given) != 2:
        raise bad("projection", f"{len(given)} arrays", "k or (E, F)")
    matrices = [as_array(f"projection[{n}]", x) for n, x in enumerate(given)]
    for n, x in enumerate(matrices):
        if x.dtype != dtype:
            raise bad_type(f"projection[{n}].dtype", str(x.dtype), f"{dtype}, the dtype of q")
        k = len(matrices[0]) if x.ndim == 2 else 0
        if not 1 <= k <= max(1, Nk) or x.shape != (k, Nk):
            accepted = f"(k, {Nk}), the same for E and F, with k from 1 to {max(1, Nk)}"
            raise bad(f"projection[{n}].shape", x.shape, accepted)
    E, F = (np.where(real[..., None, :], x, dtype.type(0)) for x in matrices)
    return E, F


def means(k: int, real: Array) -> Array:
    """The (k, Nk) matrix of means over k runs of the real keys, (Nk,) bool, as even as can be.

    With fewer real keys than k each is a run of its own, and the last rows are 0. Mean pooling is
    one of the projections that Wang et al. 2020 (arXiv:2006.04768, section 4) name.
    """
    keys, E = np.flatnonzero(real), np.zeros((k, len(real)))
    runs = min(k, len(keys))
    for row, run in zip(E, np.array_split(keys, runs) if runs else (), strict=False):
        row[run] = 1 / len(run)
    return E
