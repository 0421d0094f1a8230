"""Contrasts that a suite states: one family of p-values, quoted alike everywhere."""

from dataclasses import replace

import pytest

from fedlens.errors import FedlensError
from fedlens.reporting.study import captions, contrasts, tables
from fedlens.reporting.study.content import Answer, Cell, Contrast, Grid
from fedlens.reporting.study.statistics import difference, holm
from fedlens.suites import suite as suites

SUITE = """
seeds: 3
rows:
  ridge: ridge
  means: ridge head=class_means
  deep: ridge head=deep_ridge
contrasts:
  does depth help: [deep, ridge]
  are means worse: [means, ridge]
"""


class FakeRun:
    def __init__(self, name: str, test: float) -> None:
        self.name, self.test = name, test


class FakeStudy:
    def __init__(self, runs: list[FakeRun]) -> None:
        self.runs = runs


def write(tmp_path, text: str = SUITE) -> suites.Suite:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return suites.find(str(path))


def values(base: float) -> list[float]:
    return [base + one for one in (0.0, 0.3, -0.2)]


def answered(tmp_path, tests: dict[str, list[float]]) -> list[Answer]:
    asked = contrasts.asked(write(tmp_path))
    names = {label: runs for one in asked for label, runs in zip(one.labels, one.runs, strict=True)}
    runs = [
        FakeRun(names[label][seed], value)
        for label, several in tests.items()
        for seed, value in enumerate(several)
    ]
    return contrasts.answers(asked, FakeStudy(runs))


def test_cells_are_found_by_the_names_of_their_runs(tmp_path) -> None:
    first, second = contrasts.asked(write(tmp_path))
    assert (first.question, first.labels) == ("does depth help", ("deep", "ridge"))
    assert sorted(first.runs[0]) == [0, 1, 2]
    assert "deep_ridge" in first.runs[0][0]
    assert first.runs[1] == second.runs[1]


def test_p_values_are_corrected_over_the_whole_list(tmp_path) -> None:
    tests = {"ridge": [30, 31, 29.5], "means": [25, 26.5, 24], "deep": [45, 45.2, 45.1]}
    one, two = answered(tmp_path, tests)
    by_seed = {label: dict(enumerate(several)) for label, several in tests.items()}
    deep = difference(by_seed["deep"], by_seed["ridge"])
    means = difference(by_seed["means"], by_seed["ridge"])
    assert deep is not None
    assert means is not None
    corrected = holm({"deep": deep.p, "means": means.p})
    assert (one.p, one.corrected) == (deep.p, corrected["deep"])
    assert (two.p, two.corrected) == (means.p, corrected["means"])
    assert one.effect == pytest.approx(deep.estimate.mean / deep.estimate.deviation)


def test_questions_without_runs_count_in_the_correction(tmp_path) -> None:
    one, two = answered(tmp_path, {"ridge": [30, 31, 29.5], "deep": [45, 45.2, 45.1]})
    assert one.p is not None
    assert one.corrected == 2 * one.p
    assert (two.p, two.corrected) == (None, None)


def test_a_contrast_without_runs_is_shown_as_such(tmp_path) -> None:
    one, two = answered(tmp_path, {"ridge": values(30), "deep": values(45)[:2]})
    assert (one.count, captions.verdict(one)) == (2, captions.TOO_FEW)
    assert (two.mean, captions.verdict(two)) == (None, captions.NO_RUNS)
    assert "no runs yet" in tables.asked([one, two])


def cell(runs: list[str]) -> Cell:
    return Cell(
        mean=1.0, deviation=None, half=None, validation=None, seeds=[0, 1, 2], method="", lr=None,
        candidates=1, megabytes=None, runs=runs,
    )  # fmt: skip


def test_tables_quote_the_family_and_test_nothing_else() -> None:
    own = Contrast("a", "b", "x", 1.0, 0.1, 3, p=0.01, corrected=0.04)
    grid = Grid(
        "", "", "", "", "", ["a", "b", "c"], ["x"],
        [[cell(["a0", "a1"])], [cell(["b0", "b1"])], [cell(["c0"])]],
        contrasts=[own, replace(own, row="c")],
    )  # fmt: skip
    answer = Answer("q", "b", "a", -1.0, 0.1, 3, -5.0, 0.01, 0.02, [["b1", "b0"], ["a1", "a0"]])
    stated, other = contrasts.quoted(grid, [answer]).contrasts
    assert (stated.corrected, captions.verdict(stated)) == (0.02, "higher")
    assert (other.corrected, captions.verdict(other)) == (None, captions.NOT_TESTED)
    assert "p =" not in tables.contrast_value(other)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[does depth help]", "contrasts must map questions to two labels"),
        ("{q: [deep]}", "contrasts must map questions to two labels"),
        ("{q: [deep, ridg]}", "contrasts name the cell 'ridg'"),
    ],
)
def test_wrong_contrasts_are_refused(tmp_path, text: str, sentence: str) -> None:
    with pytest.raises(FedlensError, match=sentence):
        write(tmp_path, f"rows: {{ridge: ridge, deep: ridge head=deep_ridge}}\ncontrasts: {text}\n")
