"""Directives for the pages of the algorithms: what a page shows is what the registry runs.

``{algorithms}`` is the table of all rows, ``{facts} NAME`` a row; ``{source} NAME``, ``{traffic}
NAME`` and ``{view} NAME`` show the code, the closed form beside a run, and the step viewer, with
``:backward:`` those of the backward pass. A count that is not its formula fails the build.
"""

from __future__ import annotations

import inspect
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from closed_forms import closed_forms, tex, value
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import flashsim as fs
from flashsim.algorithms import SHAPES, Algorithm
from flashsim.cost.io import expected_cost
from flashsim.viewer import EXAMPLES, random_head, view

ROOT = Path(__file__).parents[2]
N, D, SRAM = 256, 32, 8192  # of the run beside a closed form
BLOCK = 16  # its tiles where a layout of blocks decides
PARTS = 2  # of split-KV's keys
VIEW_N, VIEW_D, VIEW_TILES = 16, 4, (4, 4)  # of what can be stepped through
VIEWS = "_views"
LOOPS = {
    "Q": "over tiles of Q",
    "K": "over tiles of K and V",
    "both": "over tiles of both sides, one after the other",
}


class Page(SphinxDirective):
    """A directive about a row of the registry, or about all."""

    required_arguments = 1
    option_spec: ClassVar = {
        "backward": directives.flag,
        "sram": directives.positive_int,
        "with": directives.unchanged,
    }

    @property
    def row(self) -> Algorithm:
        try:
            return fs.ALGORITHMS[self.arguments[0]]
        except KeyError:
            raise self.error(f"no algorithm of the name {self.arguments[0]!r}") from None

    @property
    def backward(self) -> bool:
        return "backward" in self.options

    def markdown(self, *lines: str) -> list[nodes.Node]:
        """What some lines of Markdown come to."""
        return self.parse_text_to_nodes("\n".join(lines))


class Algorithms(Page):
    required_arguments = 0

    def run(self) -> list[nodes.Node]:
        lines = ["| algorithm | elements read and written, forward | |", "|---|---|---|"]
        for name, row in fs.ALGORITHMS.items():
            forms = closed_forms(name, False, row.forward_of)
            moved = f"${tex(forms['literal'])}$" if forms else ""
            lines.append(
                f"| [{row.title}]({name}.md)<br>`{name}` | {moved} | "
                f"{'exact' if row.exact else 'approximate'}, "
                f"{'both passes' if row.backward else 'forward'} |"
            )
        return self.markdown(*lines)


class Facts(Page):
    def run(self) -> list[nodes.Node]:
        name, row = self.arguments[0], self.row
        needed = [row.requires] * bool(row.requires)
        more = "".join(f", {argument}=..." for argument in [*needed, *row.options])
        facts = {
            "Call": f'`fs.attention(q, k, v, algorithm="{name}"{more})`',
            "Source": row.source,
            "Answer": "exact"
            if row.exact
            else "an approximation, and exact for its own definition",
            "Outer loop": LOOPS[row.outer],
            "Writes": ", ".join(_array(row, x) for x in row.arrays),
            "Conventions": ", ".join(
                f"`{x}`" for x in dict.fromkeys([*row.conventions, *row.backward])
            ),
            "Backward": "its own" if row.backward else "none",
        }
        if row.uncharged:
            facts["Not charged"] = ", ".join(f"`{x}`" for x in row.uncharged)
        return self.markdown("| | |", "|---|---|", *(f"| {a} | {b} |" for a, b in facts.items()))


def _array(row: Algorithm, name: str) -> str:
    shape = (row.shapes or SHAPES).get(name, SHAPES[name])
    return f"`{name}` ({', '.join(shape)}{',' * (len(shape) == 1)})"


class Source(Page):
    def run(self) -> list[nodes.Node]:
        if self.backward:
            functions = dict.fromkeys(x.run for x in self.row.backward.values())
        else:
            functions = {self.row.forward: None}
        for name in self.options.get("with", "").split():
            functions[getattr(inspect.getmodule(self.row.forward), name)] = None
        lines = []
        for function in functions:
            path = Path(inspect.getsourcefile(function)).relative_to(ROOT)
            lines += [
                f"```{{literalinclude}} /../{path}",
                f":pyobject: {function.__name__}",
                f":caption: {path}",
                "```",
                "",
            ]
        return self.markdown(*lines)


class Traffic(Page):
    """The formulas, and a table of a run that must come to what they say."""

    def run(self) -> list[nodes.Node]:
        name, sram = self.arguments[0], self.options.get("sram", SRAM)
        qkv, what = example(name, N, D, (BLOCK, BLOCK))
        what["sram"] = sram
        tiles = (BLOCK, BLOCK) if self.row.requires == "block_mask" else None
        out = fs.attention(*qkv, algorithm=name, tiles=tiles, **what)
        if self.backward:
            out.backward(np.ones_like(out.output))
        moved = out.traffic_backward if self.backward else out.traffic
        cost = expected_cost(out, *qkv, backward=self.backward, **what)
        if (moved.reads, moved.writes) != (cost.reads, cost.writes):
            raise self.error(f"{name}: a run moved {moved}, its closed form says {cost}")
        Br, Bc = out.tiles_backward if self.backward else out.tiles
        lines = self.formulas(name, Br, Bc, what, qkv, out)
        lines += [
            "",
            f"A run at N = {N}, d = {D}, on a chip of {sram:,} elements, with tiles of "
            f"{Br} × {Bc}; elements, one head. Each count equals its closed form.",
            "",
            "| array | read | written |",
            "|---|---:|---:|",
        ]
        for x in dict.fromkeys([*cost.reads, *cost.writes]):
            lines.append(f"| `{x}` | {moved.reads.get(x, 0):,} | {moved.writes.get(x, 0):,} |")
        lines += [
            f"| in all | {moved.read_elements:,} | {moved.written_elements:,} |",
            "",
            f"It takes at most {cost.sram_elements:,} elements of SRAM at a time and "
            f"{cost.extra_hbm_elements:,} elements of HBM beyond Q, K, V and O, "
            f"{cost.flops:,} operations in matrix products and {cost.exps:,} exponentials.",
        ]
        if name != "standard":
            lines.append(self.beside_standard(moved.total_elements, sram))
        return self.markdown(*lines)

    def formulas(
        self, name: str, Br: int, Bc: int, what: dict[str, Any], qkv: Any, out: Any
    ) -> list[str]:
        forms = closed_forms(name, self.backward, self.row.forward_of)
        layout = what.get("block_mask")
        sizes = {"N": N, "d": D, "Br": Br, "Bc": Bc, "k": what.get("projection", 0)}
        sizes |= {"w": what.get("local_window", 0), "n": what.get("splits", 1)}
        if layout is not None:
            sizes["s"] = Fraction(int(layout.sum()), layout.size)
        lines = []
        for convention, formula in forms.items():
            given = {**what, "convention": convention, "backward": self.backward}
            total = expected_cost(out, *qkv, **given).total_elements
            if value(formula, **sizes) != total:
                raise self.error(f"{name}: {formula} is not {total} elements")
            label = rf"\text{{{convention}: }} " if len(forms) > 1 else ""
            lines += ["$$", f"{label}{tex(formula)}", "$$", ""]
        return lines

    def beside_standard(self, mine: int, sram: int) -> str:
        q, k, v = random_head(N, D)
        out = fs.attention(q, k, v, algorithm="standard", sram=sram)
        if self.backward:
            out.backward(np.ones_like(v))
        other = (out.traffic_backward if self.backward else out.traffic).total_elements
        return (
            f"That is {mine:,} elements read and written; standard attention moves {other:,} on "
            f"the same chip, {other / mine:.2f} times as many."
        )


class Steps(Page):
    """The step viewer in a frame."""

    def run(self) -> list[nodes.Node]:
        title = f"{self.row.title}, {'backward' if self.backward else 'forward'}, step by step"
        root = "../" * self.env.docname.count("/")
        href = f"{root}{VIEWS}/{_file(self.arguments[0], self.backward)}"
        frame = (
            f'<iframe class="view" title="{title}" src="{href}" loading="lazy"></iframe>'
            f'<p class="view-link"><a href="{href}">Open it on a page of its own</a></p>'
        )
        return [nodes.raw("", frame, format="html")]


def example(name: str, N: int, d: int, tiles: tuple[int, int]) -> tuple[list[Any], dict[str, Any]]:
    """q, k and v of a head, and the arguments that this algorithm's run takes besides."""
    q, k, v = random_head(N, d)
    needed = fs.ALGORITHMS[name].requires
    if needed == "block_tables":  # pages as long as a tile, anywhere
        pages = np.random.default_rng(0).permutation(-(-N // tiles[1]))
        k, v = (x.reshape(len(pages), -1, d)[np.argsort(pages)] for x in (k, v))
        return [q, k, v], {"block_tables": pages[None], "seq_lens": [N]}
    what = {needed: EXAMPLES[needed](tiles, N, N)} if needed else {}
    if "splits" in fs.ALGORITHMS[name].options:
        what["splits"] = PARTS
    return [q, k, v], what


def _file(name: str, backward: bool) -> str:
    return f"{name}{'-backward' * backward}.html"


def write_views(app: Sphinx, failure: Exception | None) -> None:
    """The viewer's pages of every pass there is."""
    if failure is None and app.builder.format == "html":
        folder = Path(app.outdir, VIEWS)
        folder.mkdir(exist_ok=True)
        for name, row in fs.ALGORITHMS.items():
            for backward in (False, True)[: 1 + bool(row.backward)]:
                qkv, what = example(name, VIEW_N, VIEW_D, VIEW_TILES)
                shown = view(name, *qkv, tiles=VIEW_TILES, backward=backward, **what)
                shown.save(folder / _file(name, backward))


def setup(app: Sphinx) -> dict[str, bool]:
    """Make the directives known to Sphinx."""
    for name, directive in {
        "algorithms": Algorithms,
        "facts": Facts,
        "source": Source,
        "traffic": Traffic,
        "view": Steps,
    }.items():
        app.add_directive(name, directive)
    app.connect("build-finished", write_views)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
