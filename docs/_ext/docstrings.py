"""Docstrings are plain text with code in backticks; here they become reStructuredText.

An asterisk or a bar outside code means itself, an indented block of a module's docstring is code,
and a type is a link only where its name says which type it is.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

CODE = re.compile(r"(``.*?``|`[^`]*`)")


def escape(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Rewrite a docstring in place."""
    found: list[str] = []
    literal = False
    for line in lines:
        indented = line.startswith("    ")
        literal = literal and (indented or not line)
        if what == "module" and indented and not literal and found and not found[-1]:
            if not found[-2].endswith("::"):
                found += ["::", ""]
            literal = True
        code = literal or line.lstrip().startswith((">>>", "..."))
        found.append(line if code else _escaped(line))
    lines[:] = found


def _escaped(line: str) -> str:
    pieces = CODE.split(line)  # every other one is code
    pieces[::2] = [re.sub(r"([*|])", r"\\\1", piece) for piece in pieces[::2]]
    return "".join(pieces)


def plain_types(app: Sphinx, doctree: nodes.document) -> None:
    """Take the links off types whose names do not say their module."""
    for place in doctree.findall(lambda n: isinstance(n, addnodes.desc_signature | nodes.field)):
        for link in list(place.findall(addnodes.pending_xref)):
            if link["reftype"] == "class" and "." not in link["reftarget"]:
                link.replace_self(link.children)


def setup(app: Sphinx) -> dict[str, bool]:
    """Run before Napoleon, which makes fields of the sections."""
    app.connect("autodoc-process-docstring", escape, priority=100)
    app.connect("doctree-read", plain_types)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
