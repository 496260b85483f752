"""The site's pages: none is missing, and what they show is what the package computes.

test_site_in_browser.py tests the built site: its links, and how it is in a browser.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import sys
from fractions import Fraction
from pathlib import Path

import jupytext
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashsim as fs
from flashsim.cost.io import expected_cost
from flashsim.reference import exact
from strategies import calls, tilings

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def imported(path):
    """A module from a file that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


closed_forms = imported(DOCS / "_ext" / "closed_forms.py")
claims = imported(DOCS / "_ext" / "claims.py")
modules = imported(DOCS / "_ext" / "modules.py")


def code_cells(page):
    text = (DOCS / page).read_text("utf-8")
    return re.findall(r"^```\{code-cell\} ipython3\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


# --- nothing is missing ---------------------------------------------------------------------------


def test_every_algorithm_has_a_page_that_shows_every_pass():
    index = (DOCS / "algorithms" / "index.md").read_text("utf-8")
    assert {path.stem for path in (DOCS / "algorithms").glob("*.md")} == {"index", *fs.ALGORITHMS}
    for name, row in fs.ALGORITHMS.items():
        page = (DOCS / "algorithms" / f"{name}.md").read_text("utf-8")
        shown = re.findall(r"```\{(\w+)\} (\S+)\n(:backward:)?", page)
        assert ("facts", name, "") in shown
        for directive in "source", "traffic", "view":
            assert (directive, name, "") in shown or (directive == "source" and row.forward_of)
            assert ((directive, name, ":backward:") in shown) == bool(row.backward)
        assert re.search(rf"^{re.escape(name)}$", index, re.MULTILINE)
        assert "$$" in page, "a page has equations"


def test_every_public_module_is_in_the_api():
    api = (DOCS / "api.md").read_text("utf-8")
    listed = set(re.findall(r"^flashsim[\w.]*$", api, re.MULTILINE))
    there = set(modules.modules())
    assert listed ^ there == set()


def test_every_test_about_a_public_fault_is_told_of():
    page = (DOCS / "faults.md").read_text("utf-8")
    told = set(re.findall(r"^test_\w+$", page, re.MULTILINE))
    assert told ^ set(claims.claims(ROOT / "tests" / "test_faults.py")) == set()


DRAWS = re.compile(r"\b(plt\.show|subplots|Image|SVG)\(")


def test_a_cell_draws_if_and_only_if_it_says_in_words_what_is_to_be_seen():
    """If a page says nothing, a screen reader reads the name of the file, which is a hash."""
    wrong, said = [], []
    for path in [*(ROOT / "notebooks").glob("*.md"), *DOCS.glob("*.md")]:
        for cell in jupytext.read(path, fmt="md:myst").cells:
            alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
            said += [alt] * bool(alt)
            in_words = alt.endswith(".") and len(alt.split()) > 9
            draws = cell.cell_type == "code" and DRAWS.search(cell.source) is not None
            wrong += [(path.name, cell.source)] * (draws != in_words)
    assert wrong == []
    assert len(set(said)) == len(said) > 0


# --- what is shown is so --------------------------------------------------------------------------


FORMULAS = [
    (name, backward, convention, formula)
    for (name, backward), forms in closed_forms.CLOSED_FORMS.items()
    for convention, formula in forms.items()
]


@pytest.mark.parametrize(
    "name, backward, convention, formula", FORMULAS, ids=lambda x: str(x).replace(" ", "")
)
@given(st.data())
def test_a_formula_on_a_page_is_the_closed_form_at_any_size(
    name, backward, convention, formula, data
):
    def number(low, high, label):
        return data.draw(st.integers(low, high), label=label)

    N, d = number(1, 90, "N"), number(1, 20, "d")
    Br, Bc = number(1, 100, "Br"), number(1, 100, "Bc")
    sizes, what = {}, {}
    if name == "linformer":
        sizes["k"] = what["projection"] = number(1, N, "k")
    elif name == "split_kv" and not backward:
        sizes["n"] = what["splits"] = number(2, 9, "n")
    elif name == "flash3-fp8":
        what["fp8"] = number(1, 90, "fp8")
    elif name == "rabe_staats":
        N = data.draw(st.sampled_from([1, 4, 9, 16, 25, 49, 64, 256, 576]), label="chunked N")
    elif name == "local":
        sizes["w"] = what["local_window"] = number(1, 20, "w")
        N = sizes["w"] * number(2, 6, "windows")
    elif name == "block_sparse":
        rows, columns, unit = (number(1, 6, label) for label in ("rows", "columns", "unit"))
        N, Br, Bc = rows * columns * unit, columns * unit, rows * unit
        layout = np.random.default_rng(number(0, 99, "seed")).random((rows, columns)) < 0.5
        layout[0], layout[:, 0] = True, True
        what["block_mask"], sizes["s"] = layout, Fraction(int(layout.sum()), layout.size)
    sizes |= {"N": N, "d": d, "Br": Br, "Bc": Bc}
    given_ = {"backward": backward, "convention": convention, **what}
    cost = fs.io_cost(name, N=N, d=d, Br=Br, Bc=Bc, **given_)
    assert closed_forms.value(formula, **sizes) == cost.total_elements
    shown = closed_forms.tex(formula).replace(r"\,", "*").replace("^", "**").replace("_", "")
    assert closed_forms.value(shown, **sizes) == cost.total_elements


def test_the_report_in_testing_md_is_what_its_example_prints():
    text = (DOCS / "testing.md").read_text("utf-8")
    code, printed = re.search(
        r"^```python\n(.*?)^```\n\n^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE
    ).groups()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {})
    assert out.getvalue() == printed


@pytest.fixture(scope="module")
def walkthrough(tmp_path_factory):
    """The code of the page that adds a variant, run from top to bottom; the row is taken out."""
    file = tmp_path_factory.mktemp("walkthrough") / "walkthrough.py"
    file.write_text("\n".join(code_cells("new_variant.md")), "utf-8")
    before = set(fs.ALGORITHMS)
    module = imported(file)
    yield module
    for name in set(fs.ALGORITHMS) - before:
        del fs.ALGORITHMS[name]


@given(calls(), tilings)
def test_the_variant_that_a_page_adds_is_exact_and_moves_its_closed_form(walkthrough, call, tiles):
    """The page in miniature: with the row in the registry, the usual properties hold of it."""
    out = fs.attention(*call, algorithm="two-sweeps", tiles=tiles, **call.what)
    ref = exact(*call, **call.what)
    assert ref.output_ratio(out.output) <= 1
    assert ref.lse_ratio(out.lse) <= 1
    cost = expected_cost(out, *call, **call.what)
    assert out.traffic.reads == {name: n for name, n in cost.reads.items() if n}
    assert out.traffic.writes == {name: n for name, n in cost.writes.items() if n}
    assert out.sram_peak_elements == cost.sram_elements
