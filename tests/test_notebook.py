"""What notebooks call; that they run from end to end is for tests/integration/test_notebooks.py."""

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from IPython.display import Image

from fedlens import notebook
from fedlens.errors import FedlensError
from fedlens.notebook import curves, fedlens, home
from tests.reporting.run_records import write_run


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
