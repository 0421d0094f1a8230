"""Notebooks run from the first cell to the last on small data, and contain no logic."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

from fedlens.store.run_folder import runs
from tests.integration.conftest import Call

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SMALL = "data.train_per_class=6 data.test_per_class=2 backbone.resolution=16 threads=1"
DATA = f"data=synthetic augment=none backbone=vit_pico backbone.pretrained=false {SMALL}"
FEW = "federated.local_step_budget=4 evaluate.every=1 federated.participation=0.05"

PARAMETERS = {  # replaces the cell that a reader edits
    "00_centralized_baseline": f"""
SETTING = "{DATA}"
BUDGET = "train.epochs=1 train.lr=0.1"
TRIALS = "--trials 2"
""",
    "01_federated_baseline": f"""
SETTING = "{DATA}"
BUDGET = "{FEW}"
HEADS = "train=head {FEW} --only IID"
""",
    "02_task_arithmetic": f"""
SETTING = "{DATA}"
BUDGET = "{FEW} federated.local_steps=2 sparse.examples=8"
RULES = "sparse.rounds=1"
""",
    "colab_quickstart": f"""
SOURCE = ""
SUITE = "quick --seeds 1 --only ridge {SMALL} backbone.pretrained=false"
""",
}
# Figures of reports as PNG alone: PDFs, whose fonts are cut to size, take most of a report's time.
ONE_FORMAT = """
import fedlens.reporting.figures.report as _report
_report.write.__defaults__ = (("png",),)
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[KernelManager]:
    """One for all notebooks, which imports torch once; each notebook begins without any name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONWARNINGS", "ignore")  # its own libraries give some
        manager = KernelManager(kernel_name="python3")
        manager.start_kernel()
    yield manager
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


def test_every_notebook_is_executed() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_it_runs_from_the_first_cell_to_the_last(
    name: str, kernel: KernelManager, tmp_path: Path
) -> None:
    book = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    places = [place for place, cell in enumerate(book.cells) if _is_parameters(cell)]
    assert len(places) == 1
    book.cells[places[0]].source = PARAMETERS[name]
    execute(book, kernel, tmp_path)
    home = tmp_path / "fedlens"
    assert list(home.glob("runs/*/result.json"))
    assert "image/png" in str([cell.get("outputs") for cell in book.cells])
    if name != "00_centralized_baseline":
        assert (home / "report" / "index.html").stat().st_size > 10_000


@pytest.mark.parametrize("name", PARAMETERS)
def test_it_holds_no_logic_and_no_output(name: str) -> None:
    book = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    for cell in book.cells:
        if cell.cell_type != "code":
            continue
        assert cell.outputs == [], "outputs are for those who run it"
        plain = [line for line in cell.source.splitlines() if not line.lstrip().startswith("%")]
        if "find_spec" in cell.source:  # installing, where there is nothing to call yet
            continue
        for statement in ast.parse("\n".join(plain)).body:
            assert isinstance(statement, ast.Import | ast.ImportFrom | ast.Assign | ast.Expr)


def test_a_new_project_works_at_once(
    no_plugins: Path,
    fedlens: Call,
    kernel: KernelManager,
    monkeypatch: pytest.MonkeyPatch,
    unsaved_figures: None,
) -> None:
    """Its experiment, its suite, its report, and its notebook, which finds the finished runs."""
    assert fedlens("new", "study")[0] == 0
    code, _, err = fedlens("new", "study")
    assert code == 2
    assert "study is not empty: name a new or empty folder." in err
    project = no_plugins / "study"
    monkeypatch.chdir(project)
    few = ["backbone.pretrained=false", "data.train_per_class=4", "data.test_per_class=2",
           "federated.clients=5", "federated.participation=0.6", "federated.rounds=2",
           "sparse.rounds=1", "sparse.examples=8", "backbone.resolution=16",
           "threads=1"]  # fmt: skip
    code, _, err = fedlens("run", "experiment.yaml", *few)
    assert code == 0, err
    (folder,) = runs(Path("runs"))
    labels = (folder.result or {})["labels"]
    assert labels["mask_rule"] == "lowest saliency"
    assert labels["algorithm"] == "mean without outliers"
    code, out, err = fedlens("suite", "suite.yaml", *few)
    assert code == 0, out + err
    assert len(runs(Path("runs"))) == 4  # one of them is the experiment
    code, _, err = fedlens("report", "runs", "--out", "report")
    assert code == 0, err
    book = nbformat.read(project / "notebook.ipynb", as_version=4)
    (cell,) = filter(_is_parameters, book.cells)
    cell.source = f"SETTING = {' '.join(few)!r}"
    execute(book, kernel, project)
    assert "image/png" in str([one.get("outputs") for one in book.cells])
    readme = (project / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) < 40


def execute(book: nbformat.NotebookNode, kernel: KernelManager, folder: Path) -> None:
    """All cells, in this folder, which may be removed afterwards."""
    book.cells.insert(0, new_code_cell(f"%reset -f\n%cd -q {folder}\n{ONE_FORMAT}"))
    book.cells.append(new_code_cell(f"%cd -q {NOTEBOOKS}"))
    client = NotebookClient(book, km=kernel, timeout=300)
    try:
        client.execute()
    finally:
        client.kc.stop_channels()


def _is_parameters(cell: nbformat.NotebookNode) -> bool:
    return "parameters" in cell.metadata.get("tags", [])


def test_nothing_of_this_machine_is_in_them() -> None:
    for path in NOTEBOOKS.glob("*.ipynb"):
        assert os.fspath(Path.home()) not in path.read_text(encoding="utf-8")
