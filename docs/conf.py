"""Sphinx configuration: Markdown pages, and the notebooks, executed at every build."""

import shutil
import sys
from importlib.metadata import files
from importlib.metadata import version as installed_version
from pathlib import Path

here = Path(__file__).parent
sys.path.insert(0, str(here / "_ext"))

project = "flashsim"
author = "flashsim developers"
copyright = "2026, flashsim developers"
release = version = installed_version("flashsim")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "algorithm_pages",
    "claims",
    "docstrings",
    "modules",
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3
smartquotes = False  # "literal" is a value to type

html_theme = "furo"
html_title = "flashsim"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"

# Docstrings are NumPy's; a name in single backticks is a link where there is such a name.
default_role = "py:obj"
napoleon_google_docstring = False
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "ignore-module-all": True}
python_maximum_signature_line_length = 88
add_module_names = False

# The site asks for nothing from outside: the fonts are the reader's own, and MathJax, with its
# glyphs, is one file of a package.
mathjax_path = "tex-svg.js"
html_static_path += [
    str(file.locate())
    for file in files("sphinx-mathjax-offline") or []
    if file.name == "tex-svg.js"
]

# Always executed, so that no page shows the output of older code. A cell that raises is a warning,
# which `-W` makes an error.
nb_execution_mode = "force"
nb_execution_show_tb = True
nb_execution_timeout = 120
nb_merge_streams = True  # what a cell prints stays in one piece

# Sphinx reads sources below docs/ only, while the notebooks stand at the top of the repository.
copies = here / "_notebooks"
shutil.rmtree(copies, ignore_errors=True)
shutil.copytree(
    here.parent / "notebooks", copies, ignore=shutil.ignore_patterns(".ipynb_checkpoints", "*.md")
)
