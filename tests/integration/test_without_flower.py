"""Flower is an extra: where it is not installed, its commands say so and the others do not care.

No `importorskip` here: these hold with and without it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# None among the modules is what a package that is not there looks like.
WITHOUT = (
    "import sys\n"
    "sys.modules['flwr'] = sys.modules['ray'] = None\n"
    "from fedlens.cli import main\n"
    "main()\n"
)


def without_flower(*words: str, at: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, *words],
        cwd=at,
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(
    "words",
    [
        ("run", "quickstart_fedavg", "engine=flower"),
        ("run", "quickstart_fedavg", "engine=flower_simulation"),
        ("flower", "up"),
    ],
    ids=" ".join,
)
def test_without_flower_one_is_told_how_to_install_it(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    done = without_flower(*words, at=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "fedlens[flower]" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []  # neither a run nor a federation was begun


def test_what_needs_no_flower_works_without_it(tmp_path: Path) -> None:
    done = without_flower("config", "quickstart_fedavg", "engine=serial", at=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "name: serial" in done.stdout
