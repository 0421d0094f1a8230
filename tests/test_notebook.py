"""What notebooks call; that they run from end to end is for tests/integration/test_notebooks.py."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from IPython.core.inputtransformer2 import TransformerManager
from IPython.display import Image

from fedlens import notebook
from fedlens.errors import FedlensError
from fedlens.notebook import curves, fedlens, home
from tests.reporting.run_records import write_run

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def test_runs_are_kept_beside_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert home() == tmp_path / "fedlens" == Path.cwd()
    assert home("elsewhere") == tmp_path / "fedlens" / "elsewhere"


def test_on_colab_they_are_kept_on_the_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted = []
    drive = ModuleType("google.colab.drive")
    drive.mount = mounted.append  # type: ignore[attr-defined]
    for name, module in {
        "google": ModuleType("google"), "google.colab": ModuleType("google.colab"),
        "google.colab.drive": drive,
    }.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(notebook, "_on_colab", lambda: True)
    monkeypatch.setenv("FEDLENS_CACHE", "")  # to be put back
    monkeypatch.delenv("FEDLENS_CACHE")
    monkeypatch.chdir(tmp_path)
    mount = str(tmp_path / "drive")
    assert home("fedlens", mount=mount) == tmp_path / "drive" / "MyDrive" / "fedlens"
    assert mounted == [mount]
    assert os.environ["FEDLENS_CACHE"] == str(Path.cwd() / "cache")


def test_a_mistake_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FedlensError, match="is not a known experiment") as raised:
        fedlens("run centralised")
    assert raised.value.__suppress_context__


def test_curves_of_runs_by_a_part_of_their_name(tmp_path: Path) -> None:
    write_run(tmp_path, name="one_run")
    write_run(tmp_path, name="another", seed=1)
    assert isinstance(curves("one", root=tmp_path), Image)
    with pytest.raises(FedlensError, match="nothing_like_it in its name"):
        curves("nothing_like_it", root=tmp_path)


class Colab:
    """The cell that installs fedlens, run where it is not installed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        book = json.loads((NOTEBOOKS / "colab_quickstart.ipynb").read_text("utf-8"))
        cells = ["".join(cell["source"]) for cell in book["cells"]]
        [source] = [cell for cell in cells if "find_spec" in cell]
        # `%pip` becomes a call of the kernel.
        text = TransformerManager().transform_cell(source.replace("/content", str(folder)))
        self.code = compile(text, "cell", "exec")
        self.installed: list[str] = []
        notebook = folder / "clone" / "notebooks"
        notebook.mkdir(parents=True)
        monkeypatch.chdir(notebook)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: self.installed or None)

    def run(self, source: str = "") -> None:
        exec(self.code, {"SOURCE": source, "get_ipython": lambda: self})

    def run_line_magic(self, magic: str, line: str) -> None:
        assert (magic, line) == ("pip", 'install --quiet "{source}"')
        self.installed.append(sys._getframe(1).f_globals["source"])


@pytest.fixture
def colab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Colab:
    return Colab(tmp_path, monkeypatch)


def test_where_there_is_nothing_to_install_the_notebook_stops_with_a_sentence(
    colab: Colab,
) -> None:
    with pytest.raises(SystemExit, match="fedlens was not found: set SOURCE"):
        colab.run()
    assert not colab.installed


def test_it_installs_what_it_finds_and_above_all_what_it_is_told(
    colab: Colab, tmp_path: Path
) -> None:
    (tmp_path / "clone" / "fedlens-0.1.0-py3-none-any.whl").touch()
    colab.run()
    (tmp_path / "clone" / "src" / "fedlens").mkdir(parents=True)
    colab.run()  # nothing, since it is installed by now
    assert [Path(path).suffix for path in colab.installed] == [".whl"]
    colab.installed.clear()
    colab.run()
    assert colab.installed == [str(tmp_path / "clone")]  # a notebook of a clone has it above
    colab.installed.clear()
    colab.run("git+https://example.org/fedlens")
    assert colab.installed == ["git+https://example.org/fedlens"]


def test_on_colab_the_drive_is_mounted_before_it_is_searched(
    colab: Colab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mount(path: str) -> None:
        (Path(path) / "MyDrive" / "fedlens" / "runs").mkdir(parents=True)  # of an earlier day
        (Path(path) / "MyDrive" / "fedlens-main.zip").touch()

    package = ModuleType("google.colab")
    package.drive = SimpleNamespace(mount=mount)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "google", ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.colab", package)
    colab.run()
    assert colab.installed == [str(tmp_path / "drive" / "MyDrive" / "fedlens-main.zip")]


def test_what_pip_cannot_install_stops_it_too(
    colab: Colab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="nowhere could not be installed"):
        colab.run("nowhere")
