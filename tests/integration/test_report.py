"""`fedlens report` on a small study."""

import json
import re
from pathlib import Path

from tests.integration.conftest import Call
from tests.reporting.run_records import load, write_study


def test_the_command_prints_the_audit_and_the_path_of_the_page(
    fedlens: Call, tmp_path: Path, unsaved_figures: None
) -> None:
    runs, out = write_study(tmp_path / "runs"), tmp_path / "out"
    code, printed, _ = fedlens("report", str(runs), "--out", str(out))
    assert code == 0
    assert re.search(r"PASS +Nothing was chosen on test data", printed)
    assert printed.splitlines()[-1] == f"report  {out / 'index.html'}"
    for path in runs.glob("*/choice.json"):
        path.write_text(json.dumps({**load(path), "chosen_on": "test"}))
    code, printed, _ = fedlens("report", str(runs), "--out", str(out))
    assert code == 0
    assert re.search(r"FAIL +Nothing was chosen on test data", printed)
    assert "chosen on test" in printed
