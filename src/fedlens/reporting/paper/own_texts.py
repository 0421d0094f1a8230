"""The author's own words: files beside report.tex, which a new report never overwrites.

report.tex reads each at its place (`\\yours{discussion}`). A new one holds comments only, so it
prints nothing until its author writes something.
"""

import shutil
from pathlib import Path

PLACES = {  # file → what belongs there
    "introduction": "What is new in your work. It is printed at the end of the introduction.",
    "related_work": "Other related work. It is printed at the end of that section.",
    "method": "What your method adds. It is printed at the end of that section.",
    "experiments": "How you chose settings that the runs do not show. It is printed after the "
    "hyper-parameters.",
    "results": "Your interpretation of the results. It is printed at the end of that section.",
    "extension": "Your interpretation of the extension. It is printed at the end of that section.",
    "discussion": "A section of your own: begin it with \\section{Discussion}.",
    "limitations": "More limitations. They are printed at the end of that section.",
    "conclusion": "Your conclusion. It is printed at the end of the paper.",
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
