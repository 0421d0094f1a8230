"""From report.tex to report.pdf by latexmk, where there is one; the same source, the same bytes."""

import os
import shutil
import subprocess
from pathlib import Path

from fedlens.errors import FedlensError

SOURCE = "report.tex"
PATIENCE = 300  # seconds; a report takes about ten
LEFTOVERS = ("aux", "bbl", "blg", "fdb_latexmk", "fls", "log", "out")
CLOCK = {"SOURCE_DATE_EPOCH": "0", "FORCE_SOURCE_DATE": "1"}  # else a PDF tells when it was made


def compile_pdf(folder: Path, *, tidy: bool = True) -> Path:
    """`tidy` removes what TeX leaves beside the PDF; after a failure all of it stays."""
    if not shutil.which("latexmk"):
        raise FedlensError(
            f"latexmk is not installed, so {folder / SOURCE} stays as it is: install it (Debian: "
            "apt install latexmk texlive-latex-extra), or leave --pdf out."
        )
    command = ["latexmk", "-pdf", "-norc", "-interaction=nonstopmode", "-halt-on-error", SOURCE]
    log = (folder / SOURCE).with_suffix(".log")
    try:
        ended = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | CLOCK,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise FedlensError(
            f"LaTeX did not end within {PATIENCE} seconds: {log} says how far it came."
        ) from error
    if ended.returncode:
        raise FedlensError(f"LaTeX could not compile {SOURCE}{_complaint(log)}: see {log}.")
    if tidy:
        for suffix in LEFTOVERS:
            log.with_suffix(f".{suffix}").unlink(missing_ok=True)
    return log.with_suffix(".pdf")


def _complaint(log: Path) -> str:
    """What TeX said first, if it got as far as saying anything."""
    if not log.exists():
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    first = next((line for line in lines if line.startswith("! ")), "")
    return f" ({first[2:].rstrip('.')})" if first else ""
