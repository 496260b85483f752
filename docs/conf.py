"""Sphinx configuration: Markdown pages, and the notebooks, executed at every build."""

import shutil
from importlib.metadata import version as installed_version
from pathlib import Path

project = "flashsim"
author = "flashsim developers"
copyright = "2026, flashsim developers"
release = version = installed_version("flashsim")

extensions = ["myst_nb"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "flashsim"

# Always executed, so that no page shows the output of older code. A cell that raises is a warning,
# which `-W` makes an error.
nb_execution_mode = "force"
nb_execution_show_tb = True
nb_execution_timeout = 120

# Sphinx reads sources below docs/ only, while the notebooks stand at the top of the repository.
_here = Path(__file__).parent
_copies = _here / "_notebooks"
shutil.rmtree(_copies, ignore_errors=True)
shutil.copytree(
    _here.parent / "notebooks", _copies, ignore=shutil.ignore_patterns(".ipynb_checkpoints", "*.md")
)
