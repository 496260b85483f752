"""Hypothesis strategies: attention problems of every kind, and the tilings to run them with.

Also a few looks at results that several tests share.
"""

from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from flashsim.algorithms import ALGORITHMS
from flashsim.tables import write_table

VARIANTS = [
    (name, convention)
    for name, row in ALGORITHMS.items()
    if not row.requires and not row.forward_of
    for convention in row.conventions
]
TRAINABLE = [variant for variant in VARIANTS if ALGORITHMS[variant[0]].backward]
BACKWARDS = [
    (name, convention)
    for name, row in ALGORITHMS.items()
    if not row.requires
    for convention in row.backward
]
DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)

variants = st.sampled_from(VARIANTS)
backwards = st.sampled_from(BACKWARDS)
blocks = st.integers(1, 40)
tilings = st.tuples(blocks, blocks)


@dataclass(frozen=True)
class Call:
    """q, k, v and what is to be computed of them: `attention(*call, **call.what)`."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    what: dict = field(default_factory=dict)

    def __iter__(self):
        return iter((self.q, self.k, self.v))


def values(draw, rng, shape, dtype):
    """Normal numbers, or coarse ones with many ties, or normal ones with a few spikes."""
    kind = draw(st.sampled_from(["normal", "coarse", "spiky"]))
    x = rng.standard_normal(shape)
    if kind == "coarse":
        x = np.round(x)
    elif kind == "spiky" and x.size:
        x.flat[rng.integers(x.size)] *= draw(st.sampled_from([4, 16, 64]))
    return x.astype(dtype)


def masks(draw, rng, batch, heads, Nq, Nk):
    """Any combination of the masks there are, as keyword arguments."""
    what = {}
    if draw(st.booleans()):
        what["is_causal"] = True
    if draw(st.booleans()):
        what["causal_align"] = draw(st.sampled_from(["bottom-right", "top-left"]))
    if draw(st.booleans()):
        side = st.none() | st.integers(0, max(Nq, Nk))
        what["window"] = draw(st.tuples(side, side))
    padding = draw(st.sampled_from(["none", "lengths", "holes"]))
    if padding == "lengths":
        what["key_padding_mask"] = np.arange(Nk) < rng.integers(0, Nk + 1, (*batch, 1))
    elif padding == "holes":
        what["key_padding_mask"] = rng.random((*batch, Nk)) < draw(st.sampled_from([0.1, 0.5, 0.9]))
    array = draw(st.sampled_from(["none", "none", "bool", "float"]))
    if array != "none":
        full = (*batch, heads, Nq, Nk)
        shape = tuple(draw(st.sampled_from([1, n])) for n in full)[
            draw(st.integers(0, len(full) - 2)) :
        ]
        keep = rng.random(shape) < 0.7
        bias = rng.standard_normal(shape).astype(np.float32)
        what["attn_mask"] = keep if array == "bool" else np.where(keep, bias, np.float32(-np.inf))
    return what


@st.composite
def calls(draw, dtypes=(np.float32,), masked=True, dropout=True, max_n=40, max_d=9):
    """A call with batch and head dimensions, ragged sizes, grouped heads and any masks."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    Nq, Nk = draw(st.integers(1, max_n)), draw(st.integers(0, max_n))
    d, dv = draw(st.integers(1, max_d)), draw(st.integers(1, max_d))
    batch = draw(st.sampled_from([(), (), (1,), (2,), (2, 1)]))
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 2), (2, 2)]))
    dtype = draw(st.sampled_from(dtypes))
    heads = kv_heads * group
    q = values(draw, rng, (*batch, heads, Nq, d), dtype)
    k = values(draw, rng, (*batch, kv_heads, Nk, d), dtype)
    v = values(draw, rng, (*batch, kv_heads, Nk, dv), dtype)
    what = masks(draw, rng, batch, heads, Nq, Nk) if masked else {}
    if group > 1:
        what["enable_gqa"] = True
    if draw(st.booleans()):
        what["scale"] = draw(st.sampled_from([0.0, 0.1, 1.0, -0.5]))
    if dropout and draw(st.integers(0, 3)) == 0:
        what |= {
            "dropout_p": draw(st.sampled_from([0.1, 0.5, 0.9])),
            "seed": draw(st.integers(0, 99)),
        }
    return Call(q, k, v, what)


def visible(Nq, Nk, what, item=()):
    """Bool (Nq, Nk), by the definition and one score at a time: the masks that are rules."""
    keep = np.zeros((Nq, Nk), bool)
    offset = 0 if what.get("causal_align") == "top-left" else Nk - Nq
    left, right = what.get("window") or (None, None)
    padding = what.get("key_padding_mask")
    for i in range(Nq):
        for j in range(Nk):
            ahead = j - (i + offset)
            keep[i, j] = (
                not (what.get("is_causal") and ahead > 0)
                and (left is None or -ahead <= left)
                and (right is None or ahead <= right)
                and (padding is None or bool(padding[item][j]))
            )
    return keep


def same_bits(a, b):
    """Whether two arrays are equal bit for bit, NaN and the sign of zero included."""
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def by_tile(v, name):
    """One of the columns of `Visits`, an entry for each query tile."""
    return [int(x) for x in np.repeat(getattr(v, name), v.times.astype(int))]


def printed(report, monkeypatch, capsys):
    """The lines of a report as a terminal of 100 columns has them."""
    monkeypatch.setenv("COLUMNS", "100")
    write_table(report)
    return [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()]


def shown_in(page):
    """The lines of the first block of output on a page of the documentation."""
    text = (Path(__file__).parent.parent / "docs" / page).read_text("utf-8")
    return text.split("```text\n")[1].split("\n```")[0].splitlines()
