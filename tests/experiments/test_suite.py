import logging
from pathlib import Path

import pytest

from fedlens.errors import FedlensError
from fedlens.experiments.compose import options
from fedlens.experiments.config import Config, run_name
from fedlens.experiments.records import RunFolder
from fedlens.experiments.suite import find, play, suites

TABLE = """
# What it is for.
rows:
  one: fedavg_iid seed=1
  two: fedavg_noniid partition.classes_per_client=5
columns:
  J=4: federated.local_steps=4
  J=8: federated.local_steps=8
alpha: [two]
"""


def written(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_every_suite_of_ours_is_documented_and_every_cell_is_another_run() -> None:
    assert [suite.name for suite in suites()] == options("suite")
    for suite in suites():
        assert "command: fedlens suite " + suite.name in suite.documentation
        cells = suite.cells(["seed=3"])
        assert len(cells) == len(suite.rows) * len(suite.columns)
        assert {cell.config.seed for cell in cells} == {3}
        assert len({run_name(cell.config) for cell in cells}) == len(cells)


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    suite = find(written(tmp_path, TABLE))
    assert (suite.name, suite.documentation, suite.alpha) == ("mine", "What it is for.", ["two"])
    cells = suite.cells(["train.lr=0.5"])
    assert [(c.row, c.column) for c in cells] == [
        ("one", "J=4"), ("one", "J=8"), ("two", "J=4"), ("two", "J=8"),
    ]  # fmt: skip
    assert [c.config.federated.local_steps for c in cells] == [4, 8, 4, 8]
    assert [c.config.seed for c in cells] == [1, 1, 0, 0]
    assert {c.config.train.lr for c in cells} == {0.5}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("columns: {a: b}", "needs `rows`"),
        ("- a list", "needs `rows`"),
        ("rows: {a: fedavg_iid}\nmore: 1", "keys a suite does not know: more"),
        ("rows: {a: 1}", "words of a command line"),
        ("rows: {a: fedavg_iid}\nalpha: [b]", "alpha is a list of labels"),
        ("rows: {a: fedavg_iid}\nalpha: a", "alpha is a list of labels"),
        ("rows: [", "is not a suite"),
    ],
)
def test_what_is_not_a_suite_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(FedlensError, match=complaint):
        find(written(tmp_path, text))


def test_an_unknown_suite_gets_a_suggestion_and_a_missing_file_a_sentence() -> None:
    with pytest.raises(FedlensError, match="did you mean 'sparsity'"):
        find("sparsty")
    with pytest.raises(FedlensError, match="cannot be read"):
        find("nowhere.yaml")


def test_one_that_fails_does_not_stop_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start(config: Config) -> RunFolder:
        if config.federated.local_steps == 4:
            raise FedlensError("it would not")
        return RunFolder(tmp_path)

    with caplog.at_level(logging.WARNING):
        outcomes = list(play(find(written(tmp_path, TABLE)).cells([]), start))
    assert [outcome.failure for outcome in outcomes] == ["it would not", None] * 2
    assert [outcome.folder is None for outcome in outcomes] == [True, False] * 2
    assert "one J=4 failed: it would not" in caplog.text
