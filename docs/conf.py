"""How Sphinx builds the pages: python -m sphinx -W --keep-going -b html docs build/docs."""

from __future__ import annotations

import re
import sys
from typing import Any

from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging

import kvindex

logger = logging.getLogger(__name__)

project = "kvindex"
author = "The kvindex authors"
project_copyright = "The kvindex authors"
release = version = kvindex.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns: list[str] = []
html_theme = "furo"
html_title = f"kvindex {release}"
html_static_path = ["static"]
html_css_files = ["theme.css"]

# Markdown: headings can be linked to, and a broken link is a warning, which fails the build.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]

# Docstrings are in the Google style, with `names` in single backticks.
default_role = "py:obj"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Fields are in the "Attributes" of their class, and nowhere else.
napoleon_custom_sections = [("Attributes", "params_style")]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True  # "LATEST", not what that holds
autodoc_default_options = {
    "members": True,
    "inherited-members": "Struct,BaseException,OSError,tuple,str,Enum,Protocol,ABC",
}

_FENCE = re.compile(r"^\s*```")


def _fences_to_literal_blocks(
    app: Any, what: str, name: str, thing: object, options: Any, lines: list[str]
) -> None:
    """Show what a docstring has between ``` as it is: pictures, and trees of errors."""
    inside = False
    shown: list[str] = []
    for line in lines:
        if _FENCE.match(line):
            shown += [""] if inside else ["", "::", ""]
            inside = not inside
        else:
            shown.append(f"    {line}" if inside else line)
    lines[:] = shown


def _docstrings_of_constants(
    app: Any, what: str, name: str, thing: object, options: Any, lines: list[str]
) -> None:
    """Show what the source says below a constant or a type; Python itself keeps none of it."""
    if what != "data":
        return
    key = ("", name.rpartition(".")[2])
    for module in [one for one in sys.modules if one.startswith("kvindex.")]:
        if sys.modules[module].__dict__.get(key[1]) is not thing:
            continue
        found = ModuleAnalyzer.for_module(module).find_attr_docs().get(key)
        if found:
            lines[:] = found
            return
    logger.warning("%s has no docstring below it", name)


def setup(app: Any) -> None:
    """Have Sphinx call what this file defines."""
    app.connect("autodoc-process-docstring", _docstrings_of_constants, priority=900)
    app.connect("autodoc-process-docstring", _fences_to_literal_blocks, priority=400)
