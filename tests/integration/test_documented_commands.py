"""Every `fedlens` command of README, tutorial and how-tos works, in a tiny setting.

One rule decides what happens to a command, by its first word:
- `run`, `suite` and `data partition` of the tutorial and README run, with TINY appended;
- `ls`, `show`, `config`, `masks` and `arithmetic` of the tutorial run on those runs;
- `report` runs once, after the last page, on all runs of the tutorial;
- `run`, `tune` and `arithmetic` of how-tos and concepts run on the synthetic benchmark, each once;
- commands on folders of one's own, Flower, SLURM and Colab run in the tests of those features;
- all other commands need hours or a network. tests/test_docs.py parses them, and composes and
  checks the configs of their runs.
"""

import re
import shlex
import sys
from pathlib import Path

import pytest

from fedlens.store.run_folder import runs
from tests.integration.conftest import Call

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "hooks"))

import tutorial  # noqa: E402  (the script that makes the tutorial's figures)

TINY = [
    "data.train_per_class=10",  # 100 classes: every client of 100 holds some
    "data.test_per_class=2",
    "backbone.pretrained=false",
    "backbone.resolution=16",  # four patches
    "train.epochs=1",
    "threads=1",
]
FEDERATED = ["federated.rounds=1", "federated.participation=0.02", "federated.local_steps=1"]
SPARSE = ["sparse.rounds=1", "sparse.examples=20"]
KEPT = ["federated.participation=0.4"]  # so that the class to forget is among the kept updates
SUITE = ["--seeds", "1", "--jobs", "1", "--only", "IID"]
SYNTHETIC = ["data=synthetic", "backbone=vit_pico", "augment=none"]
ELSEWHERE = ("engine=flower", "data=", "best.yaml", "/shared/")  # in the tests of those features


def tiny(words: list[str]) -> list[str]:
    """The command, made small: later settings and options win."""
    command, name = words[0], words[1] if len(words) > 1 else ""
    if command not in ("run", "suite"):
        return words
    federated = command == "suite" or "fed" in name or name == "quickstart_sparse"
    sparse = "sparse" in name or "rules" in name
    return [
        *words,
        *TINY,
        *(FEDERATED if federated else []),
        *(SPARSE if sparse else []),
        *(KEPT if "federated.keep_updates=1" in words else []),
        *(SUITE if command == "suite" else []),
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_all(page: Path, fedlens: Call) -> int:
    count = 0
    for words in tutorial.commands(page.read_text("utf-8")):
        if words[0] == "fedlens" and words[1] != "report":
            code, out, err = fedlens(*tiny(words[1:]))
            assert code == 0, f"{shlex.join(words)}\n{out}\n{err}"
            count += 1
    return count


def test_the_tutorial_runs_from_the_first_command_to_the_last(
    folder: Path, fedlens: Call, unsaved_figures: None
) -> None:
    pages = [ROOT / "docs" / "tutorial" / "index.md", *tutorial.PAGES]
    assert len(tutorial.PAGES) == 7
    for page in pages:
        assert run_all(page, fedlens), f"{page.name} has no command"
        for image, written in tutorial.figures(page.read_text("utf-8")):
            assert (page.parent / image).resolve().stat().st_size < 200_000, image
            if not written.startswith("report"):
                assert (folder / written).exists(), f"{page.name}: no command wrote {written}"
    assert all(run.result for run in runs(folder / "runs"))
    code, out, err = fedlens("report", "runs", "--out", "report")
    assert code == 0, out + err
    assert (folder / "report" / "index.html").exists()
    drawn = {path.stem for path in (folder / "report" / "figures").iterdir()}
    # J is 1 in all tiny runs, so local_steps, the figure of page 3, is not among them
    assert drawn >= {"central", "six_models-steps", "heads", "mask_rules"}


def test_every_page_of_the_tutorial_has_a_question_a_formula_and_a_figure() -> None:
    for page in tutorial.PAGES:
        text = page.read_text("utf-8")
        assert "**Question.**" in text, page
        assert "$$" in text, page
        assert list(tutorial.figures(text)), page
        assert len(text.split()) < 600, page


@pytest.mark.usefixtures("no_plugins")
def test_the_commands_of_the_readme_run(folder: Path, fedlens: Call) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    plugin = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1]
    Path("mine.py").write_text(plugin, "utf-8")
    assert run_all(ROOT / "README.md", fedlens) == 2
    labels = {run.result["labels"].get("algorithm") for run in runs(Path("runs")) if run.result}
    assert labels == {"FedAvg", "agreeing mean"}


def how_to_commands(command: str) -> list[str]:
    """The commands of how-tos and concepts that begin with this word, each once."""
    found: dict[str, None] = {}
    for page in sorted((ROOT / "docs").glob("*/*.md")):
        if page.parent.name in ("how-to", "concepts"):
            text = page.read_text("utf-8").replace("\\\n", " ")
            for line in re.findall(rf"^fedlens ({command} .*)$", text, re.MULTILINE):
                if not any(one in line for one in ELSEWHERE):
                    found[shlex.join(shlex.split(line, comments=True))] = None
    assert found
    return list(found)


@pytest.mark.parametrize("line", how_to_commands("run"))
def test_the_runs_of_how_tos(line: str, folder: Path, fedlens: Call) -> None:
    command, name, *settings = shlex.split(line)
    rest = tiny([command, name])[2:]
    more = "data.train_per_class=20"  # enough for 10 classes of each client
    code, out, err = fedlens(command, name, *SYNTHETIC, *settings, *rest, more)
    assert code == 0, out + err
    assert [run.result is not None for run in runs(folder / "runs")] == [True]


@pytest.mark.parametrize("line", how_to_commands("tune"))
def test_the_searches_of_how_tos(line: str, folder: Path, fedlens: Call) -> None:
    command, name, *settings = shlex.split(line)
    rest = [*tiny(["run", name])[2:], "evaluate.every=1"]
    code, out, err = fedlens(command, name, *SYNTHETIC, *settings, *rest, "--trials", "2")
    assert code == 0, out + err
    assert list((folder / "runs" / "tune").glob("*/best.yaml"))


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two tiny runs, FIRST and SECOND, whose client updates were all kept."""
    from fedlens.config.compose import compose
    from fedlens.experiments.run import start

    root = tmp_path_factory.mktemp("edited")
    few = ["federated.clients=10", "federated.participation=1", "federated.rounds=1",
           "federated.local_steps=1", "federated.keep_updates=1", "partition=classes",
           "partition.classes_per_client=10", "threads=1"]  # fmt: skip
    for number, name in enumerate(("FIRST", "SECOND")):
        start(compose("quickstart_fedavg", [*TINY[:-2], *few, f"run.name={name}",
              f"seed={number}", "train.lr=0.01", f"run.root={root}"]))  # fmt: skip
    return root


@pytest.mark.parametrize("line", how_to_commands("arithmetic"))
def test_the_analyses_of_how_tos(line: str, edited: Path, fedlens: Call) -> None:
    words = [re.sub(r"^RUN$", "FIRST", word) for word in shlex.split(line)]
    code, out, err = fedlens(*words, "--runs", str(edited))
    assert code == 0, out + err
    assert "record:" in out
