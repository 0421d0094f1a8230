"""The author's own words: files beside report.tex, which a new report never overwrites.

report.tex reads each at its place (`\\yours{discussion}`). A new one holds comments only, so it
prints nothing until its author writes something.
"""

import shutil
from pathlib import Path

PLACES = {  # file → what belongs there
    "introduction": "What is new here, at the end of the introduction.",
    "related_work": "Other work, at the end of its section.",
    "method": "What your method adds, at the end of its section.",
    "experiments": "How you chose what these records do not show, after the hyper-parameters.",
    "results": "What you read from the results, at the end of their section.",
    "extension": "What you make of the extension, at the end of its section.",
    "discussion": "A section of your own: begin it with \\section{Discussion}.",
    "limitations": "More limitations, at the end of their section.",
    "conclusion": "Your conclusion, at the end of the paper.",
}
GENERATED = ("index.html", "content.json", "clock.csv", "references.bib", "tables", "figures")
PAPER = "report"  # its source, its PDF and what TeX leaves behind


def keep(older: Path, folder: Path) -> None:
    """Copies to `folder` what the author put beside an older report."""
    for path in sorted(older.iterdir()) if older.is_dir() else []:
        if path.name in GENERATED or path.stem == PAPER:
            continue
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copy2(path, folder / path.name)


def begin(folder: Path) -> None:
    """Writes the files that do not exist yet."""
    for name, place in PLACES.items():
        path = folder / f"{name}.tex"
        if not path.exists():
            path.write_text(
                f"% {place}\n% This file is yours: `fedlens report` never overwrites it.\n",
                encoding="utf-8",
            )
