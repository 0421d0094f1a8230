"""A report is a folder: whole, the same twice, and never in the place of something else."""

import json
from pathlib import Path

import pytest

from fedlens.errors import FedlensError
from fedlens.reporting import report
from fedlens.reporting.study.content import About, Content
from tests.reporting.run_records import load, write_study


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return write_study(tmp_path / "runs")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Content, dict[str, bytes]]:
    """A whole report of these runs: its content and its files."""
    folder = tmp_path_factory.mktemp("written")
    found = report.write([write_study(folder / "runs")], folder / "out", About(title="Ours"))
    return found, files(folder / "out")


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.slow
def test_it_holds_a_page_a_paper_tables_and_figures(
    written: tuple[Content, dict[str, bytes]],
) -> None:
    found, made = written
    assert {"index.html", "report.tex", "references.bib", "content.json", "clock.csv"} <= set(made)
    assert b"Ours" in made["index.html"]
    assert b"Ours" in made["report.tex"]
    assert json.loads(made["content.json"])["about"]["title"] == "Ours"
    assert "tables/heterogeneity.csv" in made
    assert "tables/heterogeneity-differences.csv" in made
    assert {f"figures/heterogeneity.{form}" for form in ("png", "svg", "pdf")} <= set(made)
    assert len(found.runs) == 4
    assert made["clock.csv"].decode().count("\n") == 5


@pytest.mark.slow
def test_what_the_clock_said_changes_the_clock_alone(
    runs: Path, written: tuple[Content, dict[str, bytes]], tmp_path: Path
) -> None:
    for path in runs.glob("*/manifest.json"):  # as if killed once and resumed later
        signed = load(path)
        later = {**signed["sessions"][0], "started": "2031-01-01T00:00:00+00:00"}
        path.write_text(json.dumps({**signed, "sessions": [*signed["sessions"], later]}))
    for path in runs.glob("*/result.json"):
        path.write_text(json.dumps({**load(path), "seconds": 9e9, "finished": "2031"}))
    report.write([runs], tmp_path / "second", About(title="Ours"))
    first, second = dict(written[1]), files(tmp_path / "second")
    assert first.pop("clock.csv") != second.pop("clock.csv")
    assert first == second


@pytest.mark.slow
def test_an_older_report_is_replaced_whole(
    runs: Path, tmp_path: Path, unsaved_figures: None
) -> None:
    out = tmp_path / "out"
    report.write([runs], out, About())
    (out / "figures" / "stale.png").write_bytes(b"")
    report.write([runs], out, About(title="Newer"))
    assert not (out / "figures" / "stale.png").exists()
    assert "Newer" in (out / "index.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_what_its_author_wrote_is_kept(runs: Path, tmp_path: Path, unsaved_figures: None) -> None:
    out = tmp_path / "out"
    report.write([runs], out, About())
    (out / "discussion.tex").write_text("My words.")
    (out / "pictures").mkdir()
    (out / "pictures" / "mine.png").write_bytes(b"1")
    report.write([runs], out, About(title="Newer"))
    assert (out / "discussion.tex").read_text() == "My words."
    assert (out / "pictures" / "mine.png").read_bytes() == b"1"
    assert (out / "introduction.tex").read_text().startswith("% ")


@pytest.mark.slow
def test_without_latexmk_a_warning_comes_first_and_the_rest_is_written(
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    unsaved_figures: None,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    caplog.set_level("INFO", logger="fedlens")
    report.write([runs], tmp_path / "out", About(), pdf=True)
    assert "latexmk is not installed" in caplog.records[0].message
    assert {"index.html", "report.tex"} <= set(files(tmp_path / "out"))


def test_what_is_no_report_is_left_alone(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter.tex").write_text("mine")
    with pytest.raises(FedlensError, match="is not a report: choose another folder"):
        report.write([runs], out, About())
    assert files(out) == {"chapter.tex": b"mine"}


def test_a_report_that_fails_leaves_the_older_one(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unsaved_figures: None
) -> None:
    out = tmp_path / "out"
    report.write([runs], out, About())
    before = files(out)

    def full(content: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "page", full)
    with pytest.raises(FedlensError, match="No space left"):
        report.write([runs], out, About())
    assert files(out) == before
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []
