"""A page for each module, and ``{modules}``: a table of the modules that its lines name.

`autosummary` would take `flashsim.attention` for the function of that name.
"""

from __future__ import annotations

import pkgutil
import shutil
from importlib import import_module
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import flashsim
import flashsim.kernels

PAGES = "_api"


def modules() -> list[str]:
    """The names of all public modules."""
    paths = {"flashsim.": flashsim.__path__, "flashsim.kernels.": flashsim.kernels.__path__}
    found = {m.name for start, path in paths.items() for m in pkgutil.walk_packages(path, start)}
    return sorted(found - {"flashsim.__main__"} | {"flashsim.kernels"})


class Modules(SphinxDirective):
    """Each module's name, as a link to its page, and the first line of its docstring."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        lines = ["| module | |", "|---|---|"]
        for name in self.content:
            about = (import_module(name).__doc__ or "").strip().partition("\n\n")[0]
            about = " ".join(about.split()).replace("|", r"\|")
            lines.append(f"| [{name}]({PAGES}/{name}.rst) | {about} |")
        return self.parse_text_to_nodes("\n".join(lines))


def write_pages(app: Sphinx) -> None:
    """A file for each module, from which autodoc makes its page."""
    folder = Path(app.srcdir, PAGES)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in modules():
        text = f"{name}\n{'=' * len(name)}\n\n.. automodule:: {name}\n"
        (folder / f"{name}.rst").write_text(text, "utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Make the directive known to Sphinx."""
    app.connect("builder-inited", write_pages)
    app.add_directive("modules", Modules)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
