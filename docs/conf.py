"""Settings of the documentation site, which ``make docs`` builds into ``site/``."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]

import messages  # noqa: E402  (beside this file)

import lightning_stateful  # noqa: E402

project = "lightning-stateful"
author = "The lightning-stateful maintainers"
version = release = lightning_stateful.__version__
html_title = f"{project} {release}"

# What stands elsewhere in the repository, and the page that includes it or takes its place.
OUTSIDE = {
    "../README.md": "index.md",
    "../CHANGELOG.md": "changelog.md",
    "../CONTRIBUTING.md": "contributing.md",
    "../benchmarks/results/README.md": "benchmarks.md",
}

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
# The anchors of headings are those that GitHub makes, so that links work on both.
myst_heading_anchors = 4

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
maximum_signature_line_length = 80
autodoc_typehints_description_target = "documented_params"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["State"]

# Dashes alone: messages are searched for with the quotes that they have.
smartquotes_action = "D"

html_theme = "furo"
pygments_dark_style = "github-dark"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(DOCS / "_static" / "search_scores.js")
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
copybutton_prompt_text = "$ "


def _complete_page(app: Sphinx, name: str, source: list[str]) -> None:
    for path, page in OUTSIDE.items():
        source[0] = source[0].replace(f"]({path}", f"]({page}")
    if name == "messages":
        source[0] = source[0].replace(messages.MARKER, messages.page_of_messages())


def setup(app: Sphinx) -> None:
    """Connect the site's own step, when Sphinx has read a page."""
    app.connect("source-read", _complete_page)
