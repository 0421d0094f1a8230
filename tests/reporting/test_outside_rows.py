"""Rows from outside the package appear in every table, figure, page and paper."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlens.errors import FedlensError
from fedlens.registry import question
from fedlens.reporting import report
from fedlens.reporting.assemble import content
from fedlens.reporting.study.comparison import Axis, Comparison
from fedlens.reporting.study.content import About
from fedlens.reporting.study.questions import by_partition, questions
from fedlens.reporting.study.selection import Methods
from tests.reporting.run_records import NONIID, masked, study_of, write_run

BATCH = Axis(
    "batch size", ("train.batch_size",),
    lambda m: f"batch {m.get('train.batch_size')}", lambda m: m.get("train.batch_size"),
)  # fmt: skip


@pytest.fixture
def batch_sizes() -> Iterator[str]:
    @question(label="Does the batch size matter", suite="mine", figure="lines", x="rows",
              x_label="batch size", x_base=2, audit=("tuning",))  # fmt: skip
    def batch_sizes(methods: Methods) -> list[Comparison]:
        return by_partition(methods, BATCH, references=["batch 8"])

    yield "batch_sizes"
    del question.added["batch_sizes"]


@pytest.mark.slow
def test_a_question_from_outside_is_in_the_whole_report(
    batch_sizes: str, tmp_path: Path, unsaved_figures: None
) -> None:
    for seed in range(3):
        for size in (8, 16):
            for where in ({}, NONIID):
                test = 0.5 + 0.01 * seed + 0.001 * size * (seed + 1)
                changes = {**where, "train.batch_size": size}
                write_run(tmp_path / "runs", changes, seed=seed, test=test)
    found = report.write([tmp_path / "runs"], tmp_path / "out", About())
    (grid,) = (one for one in found.chapters[0].grids if one.question == batch_sizes)
    assert (grid.name, grid.title) == (batch_sizes, "Does the batch size matter")
    assert (grid.rows, grid.columns) == (["batch 8", "batch 16"], ["IID", "Nc=1"])
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert '<article id="table-batch_sizes">' in page
    paper = (tmp_path / "out" / "report.tex").read_text(encoding="utf-8")
    assert r"\subsection{Does the batch size matter}" in paper
    assert r"Compared with \emph{batch 8} at IID (3 seeds)" in paper
    assert r"\label{fig:batch_sizes}" in paper
    assert (tmp_path / "out" / "tables" / "batch_sizes-differences.csv").exists()
    assert (tmp_path / "out" / "figures" / "batch_sizes.pdf").exists()
    scopes = {check.title: check.scope for check in found.audit}
    assert scopes["Methods are compared at equal budget"].startswith("4 methods in 2 tables")
    assert scopes["Methods were tuned alike"].startswith("4 tables")  # with this and the headline


def test_a_question_without_runs_is_named_on_the_page_and_left_out_of_the_paper(
    batch_sizes: str, tmp_path: Path, unsaved_figures: None
) -> None:
    write_run(tmp_path / "runs")
    report.write([tmp_path / "runs"], tmp_path / "out", About())
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "Does the batch size matter" in page
    paper = (tmp_path / "out" / "report.tex").read_text(encoding="utf-8")
    assert "batch size matter" not in paper
    assert [one.name for one in questions()][-1] == batch_sizes


def test_an_unknown_trait_is_refused() -> None:
    @question(label="Misspelt", figur="dots")
    def misspelt(methods: Methods) -> list[Comparison]:
        return []

    try:
        with pytest.raises(FedlensError, match=r"'misspelt' has an unknown trait 'figur'.*figure"):
            questions()
    finally:
        del question.added["misspelt"]


def test_rows_whose_plugin_is_not_loaded_have_their_recorded_labels(tmp_path: Path) -> None:
    rings = {"partition.name": "rings", "partition.width": 3}
    named = {"partition": "rings"}
    write_run(tmp_path)
    write_run(tmp_path, rings, recorded=named)
    write_run(tmp_path, {**rings, "partition.width": 5}, recorded=named)
    median = {"algorithm.aggregator.name": "geometric_median", "algorithm.aggregator.steps": 10}
    write_run(tmp_path, median, recorded={"algorithm": "geometric median"})
    for rule in ("random", "loudest"):
        write_run(tmp_path, masked(rule), recorded={"mask_rule": f"{rule} weights"})
    oracle = {"head.name": "oracle", "head.freeze": True, "head.dropout": 0.0, "head.depth": 2}
    write_run(tmp_path, oracle, recorded={"head": "oracle"})
    found = content(study_of(tmp_path), About())
    (chapter,) = found.chapters
    grids = {grid.question: grid for grid in chapter.grids}
    assert grids["heterogeneity"].rows == ["IID", "rings, width 3", "rings, width 5"]
    assert grids["algorithms"].rows == ["FedAvg", "geometric median"]
    assert grids["mask_rules"].rows == ["dense", "random weights", "loudest weights"]
    assert grids["under_heads"].rows == [
        "full fine-tuning, linear head trained jointly", "full fine-tuning, oracle frozen",
    ]  # fmt: skip
    assert [one.rule for one in chapter.masks] == ["loudest weights", "random weights"]
    assert [one.label for one in chapter.partitions] == grids["heterogeneity"].rows
    assert json.dumps([grid.note for grid in chapter.grids])
    assert all(check.passed for check in found.audit), found.audit


@pytest.mark.slow
def test_outside_rows_are_drawn_and_described(tmp_path: Path) -> None:
    rings = {"partition.name": "rings", "partition.width": 3}
    for seed in (0, 1):
        for where in ({}, rings):
            recorded = {"partition": "rings of width 3"} if where else {}
            write_run(tmp_path / "runs", where, seed=seed, recorded=recorded, test=0.4 + seed / 10)
    report.write([tmp_path / "runs"], tmp_path / "out", About(noniid="rings of width 3"))
    made = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert {"heterogeneity.pdf", "six_models-rounds.svg"} <= made
    for name in ("index.html", "report.tex", "tables/tables.md"):
        assert "rings of width 3" in (tmp_path / "out" / name).read_text(encoding="utf-8")
