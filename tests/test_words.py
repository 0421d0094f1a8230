"""Words that readers had to look up, and inverted phrases, do not come back.

Each entry names what to write instead. `codespell`, in `make lint`, checks the spelling.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLAIN_WORDS = {  # not: but
    r"not told from": "the difference between … and … is not significant",
    r"not decided|decides? nothing|undecided": "not significant; too few seeds to test",
    r"trained along": "trained jointly",
    r"longer step of the server": "a larger server learning rate",
    r"goes on with it": "run the same command again to resume",
    r"(is )?none of ours": "is not a known …",
    r"of bad will": "malicious",
    r"is whole": "is complete; all runs have finished",
    r"(of )?another world|embedded world": "a different dataset or partition; synthetic benchmark",
    r"is no space": "is not a valid search space",
    r"say how to learn": "is not a training setting",
    r"[Pp]oint at a": "hover over or tap",
    r"those on record": "the recorded ones",
    r"none at all": "rounds to no …; is empty",
    r"for want of": "because … is missing",
    r"is no part of": "is not part of",
    r"(is|are|was|were) told": "receives; knows; the message says",
    r"in the course of": "during",
    r"mend(s|ed|ing)?": "correct; repair",
    r"crowd": "remote clients",
    r"breathe": "on_progress",
    r"let up by": "rounded up because of",
    r"even data": "IID data",
    r"elects? a sign": "choose the sign of the sum",
}
BANNED = re.compile("|".join(rf"\b(?:{words})\b" for words in PLAIN_WORDS))
TEXTS = {
    ROOT: ["README.md", "CONTRIBUTING.md"],
    ROOT / "src" / "fedlens": ["**/*.py", "**/*.yaml", "**/*.md", "**/*.html", "**/*.ipynb"],
    ROOT / "docs": ["**/*.md"],
    ROOT / "notebooks": ["**/*.ipynb"],
}
FILES = sorted(path for root, kinds in TEXTS.items() for kind in kinds for path in root.glob(kind))


def test_what_is_read() -> None:
    assert len(FILES) > 300


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_plain_words(path: Path) -> None:
    """A phrase is found across the end of a line too."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"\n[ \t#>]*", " ", re.sub(r'"\n\s*f?"', "", text))
    found = [text[max(0, one.start() - 40) : one.end() + 40] for one in BANNED.finditer(text)]
    assert not found, f"write as PLAIN_WORDS in {Path(__file__).name} says: {found}"


@pytest.mark.parametrize(
    "text", ["J = 16 is not told from J = 4", "what else there is to the study is whole", "crowd"]
)
def test_the_words_are_found(text: str) -> None:
    assert BANNED.search(text)
