import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedlens.config.compose import compose
from fedlens.config.identity import identity, run_name
from fedlens.config.labels import algorithm
from fedlens.config.options import options
from fedlens.errors import FedlensError
from fedlens.suites.estimates.cost import units
from fedlens.suites.plan import plan, unique_runs
from fedlens.suites.suite import Cell, find, only, suites

TABLE = """
# What it is for.
seeds: 2
rows:
  one: fedavg_iid seed=1
  two: fedavg_noniid partition.classes_per_client=5
columns:
  J=4: federated.local_steps=4
  J=8: federated.local_steps=8
analyses:
  alpha --base ridge: [two]
"""
STUDY = """
# Two tables.
seeds: 3
sections:
  first: inner.yaml train.lr=0.5 federated.clients=20
  second: other.yaml
rows:
  alone: ridge train.lr=0.25
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A study of two tables, of which one says how many seeds it wants."""
    (tmp_path / "inner.yaml").write_text(TABLE)
    (tmp_path / "other.yaml").write_text("rows: {two: fedavg_iid}")
    (tmp_path / "study.yaml").write_text(STUDY)
    return tmp_path


def places(cells: list[Cell]) -> list[tuple[str, str, str, int]]:
    return [(cell.section, cell.row, cell.column, cell.config.seed) for cell in cells]


@pytest.mark.slow
def test_every_suite_of_ours_is_documented_and_every_cell_of_a_table_is_another_run() -> None:
    assert tuple(suite.name for suite in suites()) == options("suite")
    for suite in suites():
        assert "command: fedlens suite " + suite.name in suite.documentation
        assert "cost: " in suite.documentation
        cells = suite.cells(["seed=3"], seeds=1)
        assert {cell.config.seed for cell in cells} == {3}
        for section in {cell.section for cell in cells}:
            table = [cell for cell in cells if cell.section == section]
            assert len({run_name(cell.config) for cell in table}) == len(table)


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(TABLE)
    suite = find(str(path))
    assert (suite.name, suite.documentation, suite.seeds) == ("mine", "What it is for.", 2)
    cells = suite.cells(["train.lr=0.5"])
    assert places(cells)[:4] == [
        ("", "one", "J=4", 1), ("", "one", "J=8", 1), ("", "two", "J=4", 0), ("", "two", "J=8", 0),
    ]  # fmt: skip
    assert [seed for *_, seed in places(cells)] == [1, 1, 0, 0, 2, 2, 1, 1]  # seeds outermost
    assert [c.config.federated.local_steps for c in cells] == [4, 8] * 4
    assert {c.config.train.lr for c in cells} == {0.5}
    assert [c.analyses for c in cells[1:3]] == [[], ["alpha --base ridge"]]


def test_the_words_of_a_cell_compose_to_its_config(folder: Path) -> None:
    cells = find(str(folder / "study.yaml")).cells(["partition=dirichlet", "head.dropout=0.1"])
    for cell in cells:
        experiment, *words = cell.arguments
        assert compose(experiment, words) == cell.config
        assert len({word.partition("=")[0] for word in words}) == len(words)


def test_later_words_hold_row_then_column_then_section_then_the_command(folder: Path) -> None:
    study = find(str(folder / "study.yaml"))
    first = [cell for cell in study.cells() if cell.section == "first"]
    assert {cell.config.train.lr for cell in first} == {0.5}  # the section's
    assert {cell.config.federated.local_steps for cell in first} == {4, 8}  # the columns'
    told = study.cells(["train.lr=0.125", "federated.local_steps=2"])
    assert {cell.config.train.lr for cell in told} == {0.125}
    assert {cell.config.federated.local_steps for cell in told} == {2}


def test_the_nearest_number_of_seeds_counts_and_the_commands_above_all(folder: Path) -> None:
    study = find(str(folder / "study.yaml"))

    def seeds(cells: list[Cell], section: str, row: str) -> list[int]:
        return sorted({c.config.seed for c in cells if (c.section, c.row) == (section, row)})

    cells = study.cells()
    assert seeds(cells, "", "alone") == [0, 1, 2]  # the study's own
    assert seeds(cells, "second", "two") == [0, 1, 2]  # handed down
    assert seeds(cells, "first", "two") == [0, 1]  # the section's file says two
    assert seeds(cells, "first", "one") == [1, 2]  # from the row's own seed on
    told = study.cells(["seed=7"], seeds=4)
    assert seeds(told, "first", "one") == seeds(told, "", "alone") == [7, 8, 9, 10]
    assert [c.config.seed for c in told] == sorted(c.config.seed for c in told)


def test_a_section_in_a_section_is_found_beside_its_file_and_labelled_by_both(
    folder: Path, tmp_path: Path
) -> None:
    outer = tmp_path / "outer.yaml"
    outer.write_text("sections: {all: study.yaml train.lr=1}")
    cells = find(str(outer)).cells(seeds=1)
    assert cells[1].label == "all / first / one / J=4"
    assert {cell.config.train.lr for cell in cells} == {1.0}  # the outer section's words are last


def test_common_words_come_before_all_others_and_reach_every_section(folder: Path) -> None:
    path = folder / "mine.yaml"
    path.write_text(
        """
common: federated.clients=30 train.lr=0.1 train.optimizer.momentum=0.5
rows:
  alone: fedavg_iid train.lr=0.2
sections:
  beside: other.yaml federated.clients=40
"""
    )
    alone, beside = (cell.config for cell in find(str(path)).cells())
    assert (alone.federated.clients, alone.train.lr, alone.train.optimizer.momentum) == (
        30,
        0.2,
        0.5,
    )
    assert (beside.federated.clients, beside.train.lr, beside.train.optimizer.momentum) == (
        40,
        0.1,
        0.5,
    )
    changed = find(str(path)).cells(["train.optimizer.momentum=0.7"])
    assert {cell.config.train.optimizer.momentum for cell in changed} == {0.7}


def test_a_section_written_out_is_the_suite_it_would_be_in_a_file(folder: Path) -> None:
    path = folder / "mine.yaml"
    inner = TABLE.replace("\n", "\n    ")
    path.write_text(f"common: train.lr=0.3\nsections:\n  first:{inner}")
    (folder / "outer.yaml").write_text("common: train.lr=0.3\nsections: {first: inner.yaml}")
    written, named = (find(str(folder / name)).cells() for name in ("mine.yaml", "outer.yaml"))
    assert written == named
    assert {cell.config.train.lr for cell in written} == {0.3}


def test_a_run_that_sections_share_is_run_once(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("sections: {a: heterogeneity, b: local_steps}")
    runs = plan(find(str(path)).cells(["run.root=nowhere"]))
    assert len(runs) == 5 + 15
    assert len(unique_runs(runs)) == 15
    assert [run.cell.section for run in unique_runs(runs)] == ["a"] * 5 + ["b"] * 10


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("columns: {a: b}", "needs `rows`"),
        ("- a list", "needs `rows`"),
        ("rows: {a: fedavg_iid}\nmore: 1", "unknown keys more"),
        ("rows: {a: fedavg_iid}\nalpha: [a]", "unknown keys alpha"),
        ("rows: {a: 1}", "command-line words"),
        ("rows: {a: ''}", "command-line words"),
        ("rows: {a: fedavg_iid}\nanalyses: {alpha: [b]}", "lists of row labels"),
        ("rows: {a: fedavg_iid}\nanalyses: [alpha]", "lists of row labels"),
        ("rows: {a: fedavg_iid}\nseeds: 0", "at least 1, not 0"),
        ("rows: {a: fedavg_iid}\nseeds: true", "at least 1, not True"),
        ("rows: [", "is not a YAML file"),
        ("rows: {}", "at least one label"),
        ("rows: {0.3: fedavg_iid}", "numbers in quotes"),
        ("rows: {a: fedavg_iid}\ncolumns: {}", "at least one label"),
        ("sections: {}", "at least one label"),
        ("rows: {a: fedavg_iid run.name='it}", "closed quotes"),
        ('sections: {a: "quick \'it"}', "closed quotes"),
        ('rows: {a: fedavg_iid}\nanalyses: {"alpha \'it": [a]}', "`fedlens arithmetic` commands"),
        ("rows: {a: fedavg_iid}\nanalyses: {'': [a]}", "`fedlens arithmetic` commands"),
        ("rows: {a: fedavg_iid}\ncommon: 1", "common must be key=value"),
        ("rows: {a: fedavg_iid}\ncommon:", "common must be key=value"),
        ("rows: {a: fedavg_iid}\ncommon: []", "common must be key=value"),
        ('rows: {a: fedavg_iid}\ncommon: "train.lr=\'it"', "closed quotes"),
        ("sections: {a: {seeds: 2}}", "mine.yaml, section a is not a suite"),
        ("sections: {a: {rows: {b: ''}}}", "section a: rows must map"),
        ("sections: {a: {sections: {b: mine.yaml}}}", "contains itself as a section"),
        ("sections: {a: mine.yaml}", "contains itself as a section"),
        ("sections: {a: beside.yaml}", "contains itself as a section"),
        ("sections: {a: nonsense}", "'nonsense' is not a known suite"),
        ("sections: {a: absent.yaml}", "cannot be read"),
        ("rows: {a: fedavg_iid, a: ridge}", "the key 'a' is there twice"),
        ("rows: {a: fedavg_iid}\nseeds: 100000000", "at most 10000 and at least 1"),
        ("rows: {a: fedavg_iid}\nseeds: .nan", "at most 10000 and at least 1"),
        ("rows: {a: fedavg_iid}\nanalyses: {alpha: [[a]]}", "lists of row labels"),
        ("rows: {a: fedavg_iid}\nanalyses:", "lists of row labels"),
        ("rows:", "command-line words"),
        ("rows: {a: [fedavg_iid]}", "command-line words"),
        ("rows: {a: fedavg_iid}\ncolumns: [a]", "columns must map labels"),
        ("sections: [quick]", "sections must map labels"),
        ("rows: {a: fedavg_iid}\nplugins: 5", "plugins must be a list"),
        ("rows: {a: fedavg_iid}\nbudget: [1]", "the budget is not valid"),
        ("rows: {a: fedavg_iid}\nbudget: {levels: [{steps: .nan}]}", "must be a share"),
        ("rows: {a: fedavg_iid}\ncontrasts: {q: [a]}", "contrasts must map questions"),
        ("rows: {a: fedavg_iid}\ncontrasts: {q: [[a], a]}", "contrasts must map questions"),
        ("5: 6\nrows: {a: fedavg_iid}", "unknown keys 5"),
        ("&it {sections: {a: *it}}", "stands for what contains it"),
    ],
)
def test_what_is_not_a_suite_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "beside.yaml").write_text("sections: {back: mine.yaml}")
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(FedlensError, match=complaint):
        find(str(path))


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes("# Übung\nrows: {a: fedavg_iid}".encode("latin-1"))
    with pytest.raises(FedlensError, match="is not a YAML file"):
        find(str(path))


def test_an_experiment_that_is_a_file_is_found_beside_the_suite(tmp_path: Path) -> None:
    (tmp_path / "in here").mkdir()
    (tmp_path / "in here" / "own.yaml").write_text(
        "defaults: [/experiment/fedavg_iid]\ntrain: {lr: 0.125}"
    )
    path = tmp_path / "in here" / "mine.yaml"
    path.write_text("rows: {a: own.yaml train.optimizer.momentum=0.5}")
    (cell,) = find(str(path)).cells()
    assert (cell.config.train.lr, cell.config.train.optimizer.momentum) == (0.125, 0.5)
    assert cell.arguments[0] == str(path.parent / "own.yaml")  # the command that repeats it


def test_a_name_for_all_runs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("rows: {a: fedavg_iid run.name=it, b: fedavg_iid run.name=it train.lr=1}")
    with pytest.raises(FedlensError, match=r"leave it out, or set run\.root"):
        find(str(path)).cells(["run.name=all"])
    with pytest.raises(FedlensError, match="'a, seed 0' and 'b, seed 0' are different runs"):
        plan(find(str(path)).cells())
    path.write_text("rows: {a: fedavg_iid run.name=it, b: fedavg_iid run.name=it threads=1}")
    assert len(unique_runs(plan(find(str(path)).cells()))) == 1  # two labels of one run
    with pytest.raises(FedlensError, match="'a, seed 0' and 'a, seed 1'"):
        plan(find(str(path)).cells(seeds=2))


def test_a_row_chosen_later_drops_parameters_it_does_not_read(tmp_path: Path) -> None:
    """Nc=1 of a row gives way to a Dirichlet partition of the command; the dropout stays."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "rows: {a: fedavg_iid partition=classes partition.classes_per_client=1 head.dropout=0.1}"
    )
    (cell,) = find(str(path)).cells(["partition=dirichlet", "head=ridge"])
    assert (cell.config.partition.name, cell.config.head.dropout) == ("dirichlet", 0.1)
    assert compose(cell.arguments[0], cell.arguments[1:]) == cell.config
    with pytest.raises(FedlensError, match=r"partition\.classes_per_client is not read by"):
        find(str(path)).cells(["partition=iid", "partition.classes_per_client=2"])


@pytest.mark.parametrize("word", ["+train.lr=0.5", "++train.lr=0.5", "~train.lr", "train.lr=1,2"])
def test_words_that_a_run_refuses_are_refused_alike(word: str) -> None:
    with pytest.raises(FedlensError) as alone:
        compose("fedavg_iid", [word])
    with pytest.raises(FedlensError) as of_a_suite:
        find("heterogeneity").cells([word])
    assert str(of_a_suite.value) == str(alone.value)


def test_a_wrong_word_in_a_row_is_refused_as_it_would_be_on_the_command_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.yaml"
    for words, complaint in [
        ("fedavg_iid train.lrr=1", "did you mean 'train.lr'"),
        ("fedavg_iid train.lr=abc", "could not be converted"),
        ("fedavg_iid sparse.density=2", "density=2.0 must be in"),
        ("fedavg_id", "did you mean 'fedavg_iid'"),
    ]:
        path.write_text(f"rows: {{a: {words}}}")
        with pytest.raises(FedlensError, match=complaint):
            find(str(path)).cells()


def test_what_is_fine_only_as_a_whole_is_composed_as_a_whole(tmp_path: Path) -> None:
    """train=head alone is refused beside a density; the row takes the density back."""
    path = tmp_path / "mine.yaml"
    path.write_text("rows: {a: sparse_fedavg train=head sparse.density=null augment=none}")
    cell = find(str(path)).cells()[0]
    assert cell.config == compose(cell.arguments[0], cell.arguments[1:])


def test_an_unknown_suite_gets_a_suggestion_and_a_missing_file_a_sentence() -> None:
    with pytest.raises(FedlensError, match="did you mean 'sparsity'"):
        find("sparsty")
    with pytest.raises(FedlensError, match="cannot be read"):
        find("nowhere.yaml")


def test_only_takes_any_part_of_a_label_in_any_case(folder: Path) -> None:
    cells = find(str(folder / "study.yaml")).cells(seeds=1)
    assert len(only(cells, [])) == len(cells) == 6
    assert {c.label for c in only(cells, ["first / TWO"])} == {
        "first / two / J=4", "first / two / J=8",
    }  # fmt: skip
    assert {c.label for c in only(cells, ["alone", "j=8"])} == {
        "alone", "first / one / J=8", "first / two / J=8",
    }  # fmt: skip
    with pytest.raises(
        FedlensError, match=r"no run: choose a part of a label, as 'alone', 'first', 'second'"
    ):
        only(cells, ["third"])
    with pytest.raises(FedlensError, match=r"no run: did you mean 'first / one / J=4'\?"):
        only(cells, ["first / on / J=4"])


def test_a_whole_name_stands_for_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "rows: {Nc=1: fedavg_iid, Nc=10: fedavg_iid}\n"
        "columns: {J=4: train.lr=0.1, J=40: train.lr=0.2, late J=4: train.lr=0.3}"
    )
    outer = tmp_path / "outer.yaml"
    outer.write_text("sections: {in: mine.yaml}")
    cells = find(str(outer)).cells()

    def labels(*texts: str) -> set[str]:
        return {cell.label for cell in only(cells, texts)}

    assert labels("nc=1") == {"in / Nc=1 / J=4", "in / Nc=1 / J=40", "in / Nc=1 / late J=4"}
    assert labels("J=4") == {"in / Nc=1 / J=4", "in / Nc=10 / J=4"}
    assert labels("Nc=1 / J=4") == {"in / Nc=1 / J=4"}
    assert labels("in / Nc=1") == labels("Nc=1")
    assert labels("Nc=1 / J") == {"in / Nc=1 / J=4", "in / Nc=1 / J=40"}  # no whole name
    assert labels("Nc=") == labels("in") == {cell.label for cell in cells}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paper", "quick"])
def test_the_six_models_are_among_the_runs(name: str) -> None:
    found = set()
    for cell in find(name).cells(seeds=1):
        config = cell.config
        if config.train.trainable.name == "full" and algorithm(config) == "FedAvg":
            spread = config.partition.name if config.federated.clients else "central"
            density, rule = config.sparse.density, config.sparse.rule.name
            found.add((spread, None if density is None else (density, rule)))
    for spread in ("central", "iid", "classes"):
        assert {(spread, None), (spread, (0.1, "least_sensitive"))} <= found


@pytest.mark.slow
def test_the_study_has_one_dataset_one_backbone_and_one_budget() -> None:
    configs = [cell.config for cell in find("paper").cells()]
    assert {config.seed for config in configs} == {0, 1, 2}
    assert {(c.data.name, c.backbone.name, c.backbone.resolution) for c in configs} == {
        ("cifar100", "dino_vits16", 224)
    }
    federated = [config for config in configs if config.federated.clients]
    assert {
        (c.federated.clients, c.federated.participation, c.federated.rounds) for c in federated
    } == {(100, 0.1, "auto")}
    assert len({c.federated.local_step_budget for c in federated}) == 1
    assert len({c.train.batch_size for c in federated if units(c)}) == 1  # of those that train


@pytest.mark.slow
def test_the_full_study_holds_the_paper_and_the_extensions() -> None:
    def runs(name: str) -> set[str]:
        return {run_name(cell.config) for cell in find(name).cells(seeds=1)}

    assert runs("full") == runs("paper") | runs("extensions")
    labels = {algorithm(cell.config) for cell in find("extensions").cells()}
    assert {"SCAFFOLD", "FedNova", "FedAvgM", "FedAdam", "TIES", "DARE"} <= labels
    assert any(label.startswith("FedProx") for label in labels)
    votes = {cell.config.sparse.voting for cell in find("extensions").cells()}
    assert votes == {None, "union", "majority", "intersection"}


def test_dense_and_sparse_models_differ_in_masks_and_learning_rate_alone() -> None:
    cells = find("models").cells()
    for row in dict.fromkeys(cell.row for cell in cells):
        dense, sparse = (cell.config for cell in cells if cell.row == row)
        equal = replace(dense, sparse=sparse.sparse, train=replace(dense.train, lr=sparse.train.lr))
        assert json.dumps(identity(equal)) == json.dumps(identity(sparse))
