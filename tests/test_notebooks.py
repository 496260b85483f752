"""Every notebook runs from top to bottom, without a word on stderr, and equals its text."""

from __future__ import annotations

import re
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


def test_there_are_notebooks_and_each_has_its_text():
    assert NOTEBOOKS
    assert {path.stem for path in NOTEBOOKS} == {path.stem for path in FOLDER.glob("*.md")}


@each_notebook
def test_a_notebook_and_its_text_hold_the_same_cells(path):
    cells = nbformat.read(path, as_version=4).cells
    text = jupytext.read(path.with_suffix(".md"), fmt="md:myst")
    assert [(cell.cell_type, cell.source, cell.metadata) for cell in cells] == [
        (cell.cell_type, cell.source, cell.metadata) for cell in text.cells
    ], f"edit one of the two, then: jupytext --sync notebooks/{path.name}"
    assert text.metadata["jupytext"]["formats"] == "ipynb,md:myst"


@each_notebook
def test_a_notebook_is_kept_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata["kernelspec"]["name"] == "python3"
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@each_notebook
def test_a_notebook_asks_for_predictions_and_ends_with_what_to_read_next(path):
    cells = nbformat.read(path, as_version=4).cells
    asked = [n for n, cell in enumerate(cells) if "\ncheck(" in f"\n{cell.source}"]
    assert len(asked) >= 3
    for n in asked:
        assert "hide-input" in cells[n].metadata["tags"], "the answer must be folded"
        assert re.search(r"^prediction = .*  # a guess\b", cells[n - 1].source, re.MULTILINE)
    last = cells[-1].source.partition("## What to read next\n")[2]
    assert "https://arxiv.org/abs/" in last
    linked = re.findall(r"\]\(([^)]+\.ipynb)\)", "\n".join(cell.source for cell in cells))
    assert {name for name in linked if not (FOLDER / name).exists()} == set()


# Run before the first cell: figures are shown by plt.show(), and each must say what its axes are.
LABELS_ARE_ASKED_FOR = """
import matplotlib.pyplot as plt

def show_labelled(show=plt.show):
    for figure in map(plt.figure, plt.get_fignums()):
        for axes in figure.axes:
            x = any(a.get_xlabel() for a in axes.get_shared_x_axes().get_siblings(axes))
            y = any(a.get_ylabel() for a in axes.get_shared_y_axes().get_siblings(axes))
            bar = axes.get_label() == "<colorbar>"
            assert (x or y) if bar else (x and y), "an axis has no label"
            assert bar or axes.get_title() or figure.get_suptitle(), "a figure has no title"
    show()

plt.show = show_labelled
"""


@each_notebook
def test_a_notebook_runs_and_answers_its_predictions(path, tmp_path):
    """A guess that is filled in can be compared, is wrong, and so gives nothing away."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(LABELS_ARE_ASKED_FOR))
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not [
        output.text
        for cell in code
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stderr"
    ]
    for cell in code:
        draws = any("image/png" in output.get("data", {}) for output in cell.outputs)
        assert draws == ("mystnb" in cell.metadata), "a picture has a text in its place"
        if "check(" in cell.source:
            shown = cell.outputs[-1].data["text/plain"]
            assert shown.startswith("Not what comes out: you predicted")
            assert "The answer is" in shown, "the prediction that is filled in cannot be compared"
    scores = [
        output.data["text/plain"]
        for cell in code
        if "score(" in cell.source
        for output in cell.outputs
        if output.output_type == "execute_result"
    ]
    if scores:  # the exercise: the version that is given, and the solution
        assert scores[0].startswith("Level 1 of 5")
        assert scores[-1].startswith("Level 5 of 5")
