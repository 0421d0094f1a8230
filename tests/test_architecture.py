"""The picture in CONTRIBUTING stays true: imports go downward; reading records needs no torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import FORKED, WAITING

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_layers() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_reading_records_and_configs_loads_no_torch() -> None:
    code = (
        "import sys, fedlens.cli, fedlens.reporting.terminal.runs, fedlens.config.compose;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_files_of_tests_that_stay_together_exist() -> None:
    """A renamed one would be shared among the processes like any other."""
    assert not [path for path in WAITING | FORKED if not path.is_file()]
