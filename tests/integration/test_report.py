import json
from pathlib import Path

from tests.integration.conftest import Call
from tests.reporting.worlds import load, write_study


def test_the_command_says_what_holds_and_names_the_page(fedlens: Call, tmp_path: Path) -> None:
    runs, out = write_study(tmp_path / "runs"), tmp_path / "out"
    code, said, _ = fedlens("report", str(runs), "--out", str(out))
    assert code == 0
    assert "Nothing was chosen on test data" in said
    assert said.splitlines()[-1] == f"report  {out / 'index.html'}"
    for path in runs.glob("*/choice.json"):
        path.write_text(json.dumps({**load(path), "chosen_on": "test"}))
    code, said, _ = fedlens("report", str(runs), "--out", str(out))
    assert code == 0
    assert "violated" in said
    assert "chosen on test" in said
