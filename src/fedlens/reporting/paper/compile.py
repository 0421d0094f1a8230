"""From report.tex to report.pdf by latexmk; the same source gives the same bytes."""

import os
import shutil
import subprocess
from pathlib import Path

from fedlens.errors import FedlensError

SOURCE = "report.tex"
TIMEOUT_S = 300  # a report takes about ten
LEFTOVERS = ("aux", "bbl", "blg", "fdb_latexmk", "fls", "log", "out")
CLOCK = {"SOURCE_DATE_EPOCH": "0", "FORCE_SOURCE_DATE": "1"}  # else a PDF contains its date


def missing_program() -> str:
    """What to install before a paper can be compiled; '' if nothing is missing."""
    if shutil.which("latexmk"):
        return ""
    return (
        f"latexmk is not installed, so {SOURCE} is written but not compiled: install latexmk "
        "(Debian: apt install latexmk texlive-latex-extra), or compile the report's folder on "
        "Overleaf."
    )


def compile_pdf(folder: Path, *, tidy: bool = True) -> Path:
    """`tidy` removes TeX's auxiliary files; after a failure they stay."""
    if missing := missing_program():
        raise FedlensError(missing)
    command = ["latexmk", "-pdf", "-norc", "-interaction=nonstopmode", "-halt-on-error", SOURCE]
    log = (folder / SOURCE).with_suffix(".log")
    try:
        ended = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | CLOCK,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise FedlensError(
            f"LaTeX did not finish within {TIMEOUT_S} seconds: see {log}."
        ) from error
    if ended.returncode:
        raise FedlensError(f"LaTeX could not compile {SOURCE}{_complaint(log)}: see {log}.")
    if tidy:
        for suffix in LEFTOVERS:
            log.with_suffix(f".{suffix}").unlink(missing_ok=True)
    return log.with_suffix(".pdf")


def _complaint(log: Path) -> str:
    """TeX's first error message, if there is any."""
    if not log.exists():
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    first = next((line for line in lines if line.startswith("! ")), "")
    return f" ({first[2:].rstrip('.')})" if first else ""
