"""The report as a paper: `write` makes report.tex and references.bib, `compile_pdf` a PDF of them.

All numbers in its prose come from `Content`, written by `prose.number`.
"""

from fedlens.reporting.paper.compile import compile_pdf
from fedlens.reporting.paper.document import write

__all__ = ["compile_pdf", "write"]
