"""The report as a paper: `write` makes report.tex and references.bib, `compile_pdf` a PDF of them.

Its prose states no number of its own: each is put in from `Content` by `speech.number`.
"""

from fedlens.reporting.paper.compile import compile_pdf
from fedlens.reporting.paper.document import write

__all__ = ["compile_pdf", "write"]
