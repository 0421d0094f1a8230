"""The report as a paper: `write` makes report.tex and references.bib, `compile_pdf` a PDF of them.

`keep` carries the author's own files over from an older report.
All numbers in its prose come from `Content`, written by `prose.number`.
"""

from fedlens.reporting.paper.compile import compile_pdf, missing_program
from fedlens.reporting.paper.document import write
from fedlens.reporting.paper.own_texts import keep

__all__ = ["compile_pdf", "keep", "missing_program", "write"]
