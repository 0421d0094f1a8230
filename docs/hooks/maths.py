"""LaTeX between dollars becomes MathML when the site is built: no JavaScript, nothing fetched.

`$…$` stands in a line, `$$…$$` by itself. What latex2mathml does not know is an error, and so is a
formula in a heading, which the table of contents could not show.
"""

import re

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

# Code comes first, so that a dollar in it is a dollar.
PARTS = re.compile(
    r"(?P<code>^ *```.*?^ *```|`[^`]+`)|\$\$(?P<block>[^$]+)\$\$|\$(?P<line>[^$]+)\$|(?P<stray>\$)",
    re.DOTALL | re.MULTILINE,
)
HELD = "\ue000{}\ue001"  # stands for a formula while Markdown, which reads _ and *, is at work
PLACE = re.compile("\ue000(\\d+)\ue001")


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    del config, files
    formulas: list[str] = []

    def hold(found: re.Match[str]) -> str:
        if found["code"]:
            return found[0]
        if found["stray"]:
            raise PluginError(f"{page.file.src_uri}: a formula is begun and not ended")
        formulas.append(mathml(found["block"] or found["line"], block=bool(found["block"])))
        return HELD.format(len(formulas) - 1)

    held = PARTS.sub(hold, markdown)
    if heading := re.search("^#.*\ue000.*", held, re.MULTILINE):
        raise PluginError(f"{page.file.src_uri}: a formula in a heading: {heading[0]}")
    page.meta["formulas"] = formulas
    return held


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    del config, files
    formulas = page.meta["formulas"]
    return PLACE.sub(lambda found: formulas[int(found[1])], html)


def mathml(latex: str, *, block: bool = False) -> str:
    """One formula; a command that is not known would come out as its own name."""
    latex = " ".join(latex.split())
    if block:  # below a root or inside brackets the converter forgets that limits go underneath
        latex = latex.replace(r"\sum_", r"\sum\limits_")
    try:
        found = convert(latex, display="block" if block else "inline")
    except Exception as error:
        raise PluginError(f"This is no formula: {latex} ({type(error).__name__})") from error
    if unknown := re.search(r"\\\w+", found):
        raise PluginError(f"The command {unknown[0]} is unknown in the formula {latex}")
    return f'<span class="formula">{found}</span>' if block else found
