"""The step viewer: a recorded run as one page to step through, self-contained and offline.

    view("flash2", N=16, d=4)               # a notebook shows it
    view("flash2", backward=True).save("backward.html")
    View(record(my_algorithm, *arrays))     # any recording

The page shows the source with the line that ran, which rows of HBM were read and written and how
often, what is on chip, the traffic so far, the values that changed, and one row's online softmax.
All of it comes from the recording: the page adds up events and picks numbers out of arrays, and
computes nothing of its own. Values are float32, bit for bit; a wider run is rounded to it.
"""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from . import checks, layouts
from .algorithms import ALGORITHMS, backward_of
from .attention import Attention, attention
from .checks import bad, bad_type, clamped
from .cost.io import expected_cost
from .inputs import random_inputs
from .memory import Traffic
from .page_data import packed
from .paging import paginate
from .problem import as_array, checked
from .record import Recording, record_attention, record_backward, too_many_steps
from .turns import rises_most

Array = np.ndarray[Any, Any]

N, D, SEED = 16, 4, 7  # of a run without inputs; the row to follow is then in the first tile
MOST_ROWS = MOST_COLUMNS = 1024  # of q, k and v: the page has at least a pixel for each row
MOST_STEPS = 20_000  # a page of more is slow, and no one steps through it
OPTIONS = inspect.signature(attention).parameters


def _few_blocks(tiles: Any, Nq: int, Nk: int) -> Array:
    Br, Bc = clamped(checks.pair_of_tiles(tiles), Nq, Nk)
    return layouts.local_global((-(-Nq // Br), -(-Nk // Bc)), local=0)


# What algorithms need beyond q, k and v, for (tiles, Nq, Nk).
EXAMPLES: dict[str, Callable[[Any, int, int], Any]] = {
    "block_mask": _few_blocks,
    "local_window": lambda tiles, Nq, Nk: -(-Nq // 4) or 1,
    "projection": lambda tiles, Nq, Nk: -(-Nk // 4) or 1,
    "fp8": lambda tiles, Nq, Nk: max(tiles),
}

# What has no meaning beside what is made up. `flashsim.problem` refuses it too, but by the name of
# what no one gave.
REFUSED = {
    "block_mask": ("local_window", "projection", "cu_seqlens_q", "cu_seqlens_k"),
    "local_window": ("block_mask", "projection", "cu_seqlens_q", "cu_seqlens_k"),
    "projection": (
        "is_causal", "window", "attn_mask", "block_mask", "local_window",
        "cu_seqlens_q", "cu_seqlens_k",
    ),
    "block_tables": (
        "attn_mask", "key_padding_mask", "block_mask", "local_window", "projection",
        "cu_seqlens_q", "cu_seqlens_k",
    ),
}  # fmt: skip


def refused(algorithm: str, given: dict[str, Any]) -> Iterator[str]:
    """The names in `given` of arguments that an algorithm does not take, as of what it needs."""
    needed = ALGORITHMS[algorithm].requires
    for name in REFUSED.get(needed, ()):
        value = given.get(name)
        if value is not None and value is not False:
            yield name


@dataclass(repr=False)
class View:
    """A recording as a page.

    Attributes
    ----------
    recording : Recording
        What to show; its arrays should live in HBM, or there is no memory to see.
    title, subtitle : str
        What ran, and on what.
    closed_form_elements : int, optional
        What the whole run should read and write, by the closed form.
    standard : Traffic, optional
        That of standard attention on the same problem and chip, for comparison.
    row : int, optional
        The query row to follow. Default: the one whose running maximum rises most often.
    right : Recording, optional
        The same algorithm without a deliberate fault: values that differ from it are marked.
    note : str
        A sentence above the page, such as what the fault is.
    """

    recording: Recording
    title: str = "A recorded run"
    subtitle: str = ""
    closed_form_elements: int | None = None
    standard: Traffic | None = None
    row: int | None = None
    right: Recording | None = None
    note: str = ""

    def __post_init__(self) -> None:
        checks.instance("recording", self.recording, Recording, "one of flashsim.record")

    def html(self) -> str:
        """The page: one HTML document that asks for nothing from outside.

        Raises
        ------
        ValueError
            If the recording is empty, or a part of one: what a step shows starts at the first. If
            it has more than 20 000 steps.
        """
        if len(self.recording) > MOST_STEPS:
            raise too_many_steps(f"{len(self.recording)} steps", MOST_STEPS)
        if not self.recording.steps or self.recording[0].number != 0:
            raise bad(
                "recording", f"{len(self.recording)} steps", "a recording from its first step"
            )
        folder = files("flashsim") / "page"
        parts = {
            "{title}": html.escape(self.title),
            "/* style */": (folder / "page.css").read_text("utf-8"),
            "{data}": packed(self),
            "/* script */": (folder / "page.js").read_text("utf-8"),
        }
        marks = "|".join(map(re.escape, parts))
        return re.sub(marks, lambda m: parts[m[0]], (folder / "page.html").read_text("utf-8"))

    def save(self, path: str | Path) -> Path:
        """Write the page to a file; returns its path."""
        path = Path(path)
        path.write_text(self.html(), "utf-8")
        return path

    def __repr__(self) -> str:
        return f"<View of {self.title}: {len(self.recording)} steps; save(path) writes the page>"

    def _repr_html_(self) -> str:
        """The page in a frame of its own: several in one notebook do not meet."""
        return (
            f'<iframe title="{html.escape(self.title)}, step by step" '
            'style="width:100%;height:min(860px,92vh);border:0" '
            f'srcdoc="{html.escape(self.html())}"></iframe>'
        )


def view(
    algorithm: str = "flash2",
    q: Any = None,
    k: Any = None,
    v: Any = None,
    *,
    N: int | None = None,
    d: int | None = None,
    seed: int | None = None,
    backward: bool = False,
    do: Any = None,
    tiles: tuple[int, int] | None = None,
    sram: float | None = None,
    sram_bytes: float | None = None,
    row: int | None = None,
    **options: Any,
) -> View:
    """Run and record one head of an algorithm, for stepping through.

    Parameters
    ----------
    algorithm : str
        A name in `flashsim.ALGORITHMS`.
    q, k, v : array (N, d), (Nk, d), (Nk, dv), optional
        One head. Default: `random_head(N, d, seed)`. At most 1024 rows of at most 1024.
    N, d, seed : int, optional
        Of what is drawn. Default: 16, 4 and 7.
    backward : bool
        Show the backward pass instead of the forward one.
    do : array (N, dv), optional
        Gradient of the output, with `backward`. Default: standard normal numbers from `seed`.
    tiles : (Br, Bc), optional
        Default: the "strict" ones if there is a budget, else four tiles a side, as for a block
        layout that is made up.
    sram, sram_bytes : number, optional
        Budget of the chip, in elements or in bytes. Default: what the tiles need.
    row : int, optional
        The query row to follow. Default: the one whose running maximum rises most often.
    **options
        As for `flashsim.attention`. What an algorithm needs beyond q, k and v is made up if it is
        not given: a block layout of the diagonal, the first row and the first column; a local
        window, or a projection, of a quarter of the length; pages as long as a key tile; two parts
        of the keys.

    Returns
    -------
    View
        Its `recording` has the steps; `save` writes the page.

    Raises
    ------
    ValueError, TypeError
        As `flashsim.attention`, and if there is more than one head, or no such row, or an argument
        that would have no effect.
    """
    registered = ALGORITHMS[checks.choice("algorithm", algorithm, ALGORITHMS)]
    checks.flag("backward", backward)
    if do is not None and not backward:
        raise bad("backward", backward, "True, as do is given")
    for name in options.keys() - OPTIONS:
        accepted = ", ".join(sorted({*OPTIONS} - {"algorithm", "q", "k", "v"}))
        raise bad_type(name, options[name], f"no such argument; there are {accepted}")
    drawn = {name: x for name, x in {"N": N, "d": d, "seed": seed}.items() if x is not None}
    if checks.given_together(q=q, k=k, v=v):
        if backward and do is None:
            drawn.pop("seed", None)  # draws the gradient
        for name, number in drawn.items():
            raise bad(name, number, "None, as q, k and v are given")
    else:
        q, k, v = random_head(**drawn)
    sizes = {"q": as_array("q", q), "k": as_array("k", k), "v": as_array("v", v)}
    for name, x in sizes.items():
        if x.ndim < 2:
            raise bad(f"{name}.shape", x.shape, "two dimensions, (N, d)")
        if x.shape[-2] > MOST_ROWS or x.shape[-1] > MOST_COLUMNS:
            accepted = f"at most {MOST_ROWS} rows of at most {MOST_COLUMNS}"
            raise bad(f"{name}.shape", x.shape, accepted)
    Nq, Nk = sizes["q"].shape[-2], sizes["k"].shape[-2]
    quarters = -(-Nq // 4) or 1, -(-Nk // 4) or 1
    needed = registered.requires
    made_up = bool(needed) and options.get(needed) is None
    for name in refused(algorithm, options) if made_up else ():
        raise bad(name, "given", f"none, for algorithm={algorithm!r}")
    if tiles is None and sram is None and sram_bytes is None:
        tiles = quarters
    if tiles is None and made_up and needed == "block_mask":
        tiles = quarters  # they are the blocks
    if made_up:
        if needed == "local_window" and Nq != Nk:
            raise bad(
                "k.shape", sizes["k"].shape, f"{Nq} rows, as q has: {algorithm} takes no other"
            )
        blocks = quarters if tiles is None else checks.pair_of_tiles(tiles)
        if needed == "block_tables":
            k, v, pages = paginate(k, v, blocks[1])
            options |= pages
        else:
            options[needed] = EXAMPLES[needed](blocks, Nq, Nk)
    if "splits" in registered.options:
        options.setdefault("splits", 2)
    if tiles is not None and sram is None and sram_bytes is None:
        sram = _needed(algorithm, q, k, v, tiles, backward, options)
    given = {"sram": sram, "sram_bytes": sram_bytes, **options}
    common = {name: x for name, x in given.items() if name not in registered.options}
    forward = record_attention(
        q, k, v, algorithm=algorithm, tiles=tiles, most_steps=MOST_STEPS, **given
    )
    out: Attention = forward.result
    if row is None:
        row = rises_most(forward)
    checks.integer("row", row, 0, max(1, Nq))
    recording = forward
    if backward:
        if do is None:
            following = (SEED if seed is None else checks.integer("seed", seed, 0)) + 1
            do = np.random.default_rng(following).standard_normal(out.output.shape)
            do = do.astype(out.output.dtype)
        recording = record_backward(out, do, most_steps=MOST_STEPS)
    Br, Bc = out.tiles_backward or out.tiles
    direction = "backward" if backward else "forward"
    about = [f"N = {Nq}", f"d = {np.shape(q)[-1]}", f"tiles {Br} × {Bc}"]
    about[1:1] = [f"Nk = {Nk}"] * (Nk != Nq)
    about += [registered.source] * (not backward)
    return View(
        recording,
        title=f"{registered.title[0].upper()}{registered.title[1:]}, {direction}",
        subtitle="; ".join(about),
        closed_form_elements=expected_cost(out, q, k, v, backward=backward, **given).total_elements,
        standard=None
        if algorithm == "standard"
        else standard_traffic(q, k, v, tiles, do, **common),
        row=row,
    )


def random_head(N: int = N, d: int = D, seed: int = SEED) -> tuple[Array, Array, Array]:
    """q, k, v (N, d) float32, standard normal, the same for the same seed."""
    checks.integer("N", N, 1, MOST_ROWS + 1)
    checks.integer("d", d, 1, MOST_COLUMNS + 1)
    drawn = random_inputs((1, 1, N, d), seed)
    return drawn.q[0, 0], drawn.k[0, 0], drawn.v[0, 0]


def _needed(
    algorithm: str,
    q: Any,
    k: Any,
    v: Any,
    tiles: tuple[int, int],
    backward: bool,
    options: dict[str, Any],
) -> int:
    """Elements that the tiles take, in the pass that takes more of those that run."""
    what = {name: x for name, x in options.items() if name != "convention"}
    head = checked(q, k, v, tiles=tiles, **what).head
    Br, Bc = clamped(checks.pair_of_tiles(tiles), head.Nq, head.Nk)
    forward = ALGORITHMS[algorithm].needs(head, Br, Bc)[0]
    if not backward:
        return forward
    last = backward_of(algorithm, options.get("convention", "literal"))
    return max(forward, last.needs(head, Br, Bc)[0])


def standard_traffic(
    q: Any, k: Any, v: Any, tiles: Any = None, do: Any = None, **given: Any
) -> Traffic | None:
    """That of standard attention's pass, to compare with; None if its smallest tiles do not fit.

    `tiles` are the blocks of a layout, if one is given; with `do` it is the backward pass.
    """
    blocks = tiles if given.get("block_mask") is not None else None
    try:
        out = attention(q, k, v, algorithm="standard", tiles=blocks, **given)
        if do is None:
            return out.traffic
        out.backward(do)
    except ValueError:
        return None
    return out.traffic_backward
