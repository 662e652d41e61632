"""How Sphinx makes the site: ``make docs``. The pages are Markdown (MyST); the API reference comes from docstrings."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx.util.inspect import stringify_signature

import lightning_asgd
from lightning_asgd.cli.command_line import main
from tests.output.tables import tables

log = logging.getLogger(__name__)

project = "lightning-asgd"
author = "the lightning-asgd authors"
release = version = lightning_asgd.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
extensions += ["sphinx_copybutton", "sphinx_design"]
root_doc = "index"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3  # links such as architecture.md#collectives

html_theme = "furo"
html_title = project
html_static_path = ["static"]
html_css_files = ["site.css"]
html_favicon = "static/icon.svg"
templates_path = ["templates"]
html_show_copyright = html_show_sphinx = False
html_copy_source = False

add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
maximum_signature_line_length = 88  # longer ones: a line per argument
autosummary_generate = False
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_custom_sections = ["State", "Staleness", "Departures"]
napoleon_use_ivar = True

internals = {
    "architecture",
    "performance",
    "benchmarks",
    "changelog",
    "contributing",
    "how_to_release",
}  # not what a search is for

nitpicky = True
nitpick_ignore_regex = [
    # Others' classes: a build needs no network, so nothing is known of their documentation.
    ("py:.*", r"(torch|collections|pathlib|enum|random|typing|abc|fractions)\..*"),
    # Classes that the reference does not list, and what napoleon makes of the types of attributes.
    (
        "py:class",
        r"lightning_asgd\.(plan\.timing|ray\.run_members|caches\.peer_caches|core\.\w+\.layout)\..*|Mapping\[str|dict\[int",
    ),
]

html_math_renderer = "mathml"


def setup(app: Any) -> None:
    """Formulas as MathML, which browsers draw by themselves: no script, and nothing fetched from elsewhere."""
    app.add_html_math_renderer("mathml", (_inline_math, None), (_display_math, None))
    app.add_directive("help-of", HelpOf)
    app.add_directive("printed-lines", PrintedLines)
    app.connect("doctree-read", _show_pictures, priority=400)  # before Sphinx collects images
    app.connect("doctree-read", _keep_out_of_search)
    app.connect("missing-reference", _find_anywhere)
    app.connect("autodoc-process-signature", _show_arguments)
    app.connect("autodoc-process-docstring", _keep_attributes_text, priority=400)


class HelpOf(SphinxDirective):
    """What ``lightning-asgd COMMAND --help`` prints, in a terminal of 80 columns."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Print the help into the page."""
        said = io.StringIO()
        os.environ["COLUMNS"] = "80"
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            main([self.arguments[0], "--help"])
        return [nodes.literal_block(text=said.getvalue(), language="text")]


class PrintedLines(SphinxDirective):
    """What the package prints by itself, made from the calls that print."""

    def run(self) -> list[nodes.Node]:
        """A section for each who prints."""
        return self.parse_text_to_nodes(tables(), allow_section_headings=True)


def _inline_math(translator: Any, node: nodes.math) -> None:
    translator.body.append(_mathml(node))
    raise nodes.SkipNode


def _display_math(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{_mathml(node, as_block=True)}</div>')
    raise nodes.SkipNode


def _mathml(node: nodes.math | nodes.math_block, **options: bool) -> str:
    try:
        return str(tex2mathml(node.astext(), **options))
    except MathError as error:
        log.warning("%s: %s", node.astext(), error, location=node)
        return ""


def _keep_out_of_search(app: Any, doctree: nodes.document) -> None:
    if app.env.docname in internals:
        app.env.metadata[app.env.docname]["nosearch"] = "true"


def _show_pictures(app: Any, doctree: nodes.document) -> None:
    """An image NAME-light.svg has a twin for the dark theme. An emphasised paragraph below an image is its caption."""
    for image in [*doctree.findall(nodes.image)]:
        name, is_light, _ = image["uri"].partition("-light.svg")
        images, place = [image], image.parent
        if is_light:
            images.append(image.deepcopy())
            image["classes"], images[1]["classes"], images[1]["uri"] = ["only-light"], ["only-dark"], f"{name}-dark.svg"
            place.insert(place.index(image) + 1, images[1])
        below = place.next_node(descend=False, siblings=True)
        if isinstance(below, nodes.paragraph) and [*map(type, below.children)] == [nodes.emphasis]:
            caption = nodes.caption("", "", *below[0].children)
            below.parent.remove(below)
            place.replace_self(nodes.figure("", *images, caption, ids=[nodes.make_id(name)]))


def _find_anywhere(app: Any, env: Any, node: Any, contnode: nodes.Node) -> nodes.Node | None:
    """Docstrings name a class without its module: look for it in all of them."""
    if node.get("refdomain") != "py" or node.get("refspecific"):
        return None
    node["refspecific"] = True
    python = env.get_domain("py")
    place = (env, node["refdoc"], app.builder, node["reftype"], node["reftarget"], node, contnode)
    found: nodes.Node | None = python.resolve_xref(*place)
    return found


def _show_arguments(
    app: Any, what: str, name: str, value: Any, options: Any, signature: str | None, result: str | None
) -> tuple[str, None] | None:
    """The strategy's ``__new__`` takes any arguments: those of ``__init__`` are meant."""
    if what != "class" or signature != "(*args, **kwargs)":
        return None
    _, *arguments = inspect.signature(value.__init__).parameters.values()
    return stringify_signature(inspect.Signature(arguments)), None


def _keep_attributes_text(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Napoleon would take what stands before a colon in an attribute's first line for its type."""
    if what == "attribute":
        lines[:0] = ["..", ""]  # an empty comment
