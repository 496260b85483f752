"""What is to be computed: q, k, v, masks, scale and dropout, checked and brought into one form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import checks
from .checks import bad, bad_type
from .cost.counts import Head
from .dropout import Dropout
from .masks import Layout, Mask, band
from .memory import Machine, widened

Array = np.ndarray[Any, Any]

LARGEST_WINDOWS = 2**12  # of local attention: a layout of 2^24 blocks


@dataclass(frozen=True)
class Problem:
    """Checked inputs, (*batch, heads, N, d), whatever the algorithm."""

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

    def as_given(self, x: Array) -> Array:
        """x (*batch, heads, ...) with the leading dimensions that q came with."""
        return np.asarray(x[0] if self.alone else x)

    @property
    def head(self) -> Head:
        """The sizes that all heads share; its mask has the array's shape and the layout alone."""
        first = None if self.array is None else np.empty(self.array.shape[-2:], self.array.dtype)
        wide = widened(self.q.dtype)
        return Head(
            Mask(*self.lengths, layout=self.layout, array=first),
            self.q.shape[-1],
            self.v.shape[-1],
            self.q.itemsize,
            wide.itemsize,
            self.group,
            unmixed=0 if self.projection is None else self.k.shape[-2],
        )

    def inputs(self, at: tuple[int, ...]) -> dict[str, Array]:
        """Q, K and V of one query head; and E and F, where Linformer mixes keys."""
        shared = (*at[:-1], at[-1] // self.group)
        found = {"Q": self.q[at], "K": self.k[shared], "V": self.v[shared]}
        if self.projection is not None:
            found |= {"E": self.projection[0][at[:-1]], "F": self.projection[1][at[:-1]]}
        return found

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
        keys = None if self.real is None else self.real[at[:-1]]
        return Mask(
            *self.lengths,
            lo=self.lo,
            hi=self.hi,
            keys=keys,
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
        batch = int(np.ravel_multi_index(at[:-1], self.q.shape[:-3])) if at[:-1] else 0
        return Dropout(self.p, self.seed, batch, at[-1])


def checked(
    q: Any, k: Any, v: Any, *, is_causal: Any = False, causal_align: Any = "bottom-right",
    window: Any = None, attn_mask: Any = None, key_padding_mask: Any = None, scale: Any = None,
    dropout_p: Any = 0.0, seed: Any = 0, enable_gqa: Any = False, block_mask: Any = None,
    tiles: Any = None, local_window: Any = None, projection: Any = None,
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
    )  # fmt: skip


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


def _floats(name: str, given: Any) -> Array:
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
        k = checks.integer("projection", given, 1)
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
        if x.ndim != 2 or len(x) == 0 or x.shape != (len(matrices[0]), Nk):
            accepted = f"(k, {Nk}), the same for E and F, with k of at least 1"
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
