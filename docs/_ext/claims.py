"""A directive that lists tests: ``{claims} tests/FILE.py`` with their names, one a line.

A test's name is a claim, and the docstring of one about a fault says where it was reported.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[2]


def claims(path: Path) -> dict[str, str]:
    """The tests of a file, with their docstrings."""
    tree = ast.parse(path.read_text("utf-8"))
    return {
        node.name: ast.get_docstring(node) or ""
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


class Claims(SphinxDirective):
    """A table of the named tests."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        path = ROOT / self.arguments[0]
        self.env.note_dependency(str(path))
        known = claims(path)
        lines = ["| what holds | reported |", "|---|---|"]
        for name in filter(None, map(str.strip, self.content)):
            if name not in known:
                raise self.error(f"{self.arguments[0]} has no test {name!r}")
            claim = name.removeprefix("test_").replace("_", " ")
            where = re.sub(r"([|*<])", r"\\\1", " ".join(known[name].split()))
            lines.append(f"| {claim} | {where} |")
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app: Sphinx) -> dict[str, bool]:
    """Make the directive known to Sphinx."""
    app.add_directive("claims", Claims)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
