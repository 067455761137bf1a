"""How the API reference is built: python -m sphinx -W examples/guide/api build/api."""

import re

project = "lightning-persample"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
default_role = "code"  # `name` in a docstring
autodoc_typehints = "none"  # the docstrings say types and shapes
autodoc_member_order = "bysource"
html_theme = "furo"
html_title = "lightning-persample"


def escape_stars_and_bars(app, what, name, obj, options, lines):
    """(B, *shape) and |G|^2 are no markup, but in literals and doctests, which are as they are."""
    for place, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            parts = re.split(r"(``.*?``|`.*?`)", line)
            lines[place] = "".join(part if part[:1] == "`" else re.sub(r"[*|]", r"\\\g<0>", part) for part in parts)


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", escape_stars_and_bars, priority=400)  # before napoleon
