"""Every notebook runs from top to bottom, without a word on stderr, and equals its text."""

from __future__ import annotations

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
def test_a_notebook_runs_and_answers_its_predictions(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
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
        if "check(" in cell.source:
            shown = cell.outputs[-1].data["text/plain"]
            assert "The answer is" in shown, "the prediction that is filled in cannot be compared"
