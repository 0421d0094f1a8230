from pathlib import Path

import pytest

from fedlens.errors import FedlensError
from fedlens.reporting.study.about import read
from fedlens.reporting.study.content import Author


def written(folder: Path, text: str) -> Path:
    path = folder / "about.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_title_and_authors_with_ids_and_affiliation(tmp_path: Path) -> None:
    found = read(
        written(
            tmp_path,
            "title: Ours\nauthors:\n- {name: Ada, id: 123456, affiliation: Here}\n- Grace\n",
        )
    )
    assert found.title == "Ours"
    assert found.authors == [Author("Ada", "123456", "Here"), Author("Grace")]
    assert found.date == ""


def test_what_is_not_told_is_as_usual(tmp_path: Path) -> None:
    assert "task arithmetic" in read(written(tmp_path, "date: May 2026")).title


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("titel: Ours", "unknown key 'titel': did you mean 'title'"),
        ("authors: Ada", "authors must be a list"),
        ("authors: [{id: 1}]", "an author has no name"),
        ("authors: [{name: Ada, email: a}]", "unknown key 'email'"),
        ("authors: [[Ada]]", "must have the keys name"),
        ("title: [a, b]", "title must be a line of text"),
        ("- Ours", "must have the keys title"),
        ("title: [", "is not a YAML file"),
    ],
)
def test_what_it_does_not_know_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(FedlensError, match=complaint):
        read(written(tmp_path, text))


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FedlensError, match="cannot be read"):
        read(tmp_path / "none.yaml")
