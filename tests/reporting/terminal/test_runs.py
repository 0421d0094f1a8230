import json
from pathlib import Path

from rich.console import Console

from fedlens.reporting.terminal.runs import runs_table
from fedlens.store.run_folder import RunFolder


def test_an_interrupted_run_is_as_far_as_its_last_round_not_its_last_validation(
    tmp_path: Path,
) -> None:
    run = tmp_path / "one"
    run.mkdir()
    (run / "config.yaml").write_text("{}")
    (run / "manifest.json").write_text(json.dumps({"unit": "round", "data": "synthetic"}))
    records = [{"round": 0, "validation": {"top1": 0.25}}, {"round": 1}, {"round": 2}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    console = Console(width=120, record=True)
    console.print(runs_table([RunFolder(run)]))
    (line,) = [line for line in console.export_text().splitlines() if line.startswith("one")]
    assert "interrupted" in line
    assert "2 rounds" in line
    assert "25.00%" in line
