"""Runs the commands of the tutorial and collects the figures that its pages show.

A page lists its commands in blocks marked `bash`. Below each figure, the caption names the file
that the commands wrote. Run in the clone, without older runs: python docs/hooks/tutorial.py
"""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PAGES = sorted((Path(__file__).parents[1] / "tutorial").glob("[1-9]-*.md"))
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"!\[[^]]*\]\(([^)]+)\)(?:\{[^}]*\})?\n\*`([^`]+)`")


def commands(text: str) -> Iterator[list[str]]:
    """The commands in the `bash` blocks of a page, as lists of words."""
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def figures(text: str) -> Iterator[tuple[str, str]]:
    """(image in docs, the file that a command wrote) for every figure of a page."""
    yield from FIGURE.findall(text)


def main() -> None:
    for page in PAGES:
        text = page.read_text("utf-8")
        for words in commands(text):
            print("$", shlex.join(words), flush=True)
            subprocess.run(words, check=True)
        for image, written in figures(text):
            target = (page.parent / image).resolve()
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(written, target)


if __name__ == "__main__":
    sys.exit(main())
