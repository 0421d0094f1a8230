"""Flower is an optional extra: without it, its commands say so and all others work.

No `importorskip` here: these tests pass with and without it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A module that is None cannot be imported, like a package that is not installed.
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
def test_without_flower_the_error_says_how_to_install_it(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    done = without_flower(*words, at=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "fedlens[flower]" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []  # neither a run nor a federation was started


def test_commands_that_need_no_flower_work_without_it(tmp_path: Path) -> None:
    done = without_flower("config", "quickstart_fedavg", "engine=serial", at=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "name: serial" in done.stdout
