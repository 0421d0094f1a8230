"""Suites of tiny runs: in turn, on workers, as jobs; interrupted, with failures, as dry runs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedlens.experiments import run
from fedlens.store.run_folder import RunFolder, runs
from tests.integration.conftest import TINY, Call, facts

SMALL = [word for word in TINY if not word.startswith("train.")]
FEDERATION = (
    "federated.clients=5 federated.participation=0.6 federated.rounds=2 federated.local_steps=2"
)
TABLE = f"""
# Four runs, one of which diverges.
rows:
  central: quickstart train.epochs=2
  ridge: quickstart train=head head=ridge
  broken: quickstart train.epochs=2 train.lr=1e30
  federated: quickstart_fedavg {FEDERATION} federated.keep_updates=1
analyses:
  alpha --alphas 0,1: [federated]
"""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(TABLE)
    return "mine.yaml"


def results(root: Path) -> dict[str, object]:
    """Of every run, what must be equal bit for bit; None where it has no result."""
    return {folder.name: None if folder.result is None else facts(folder) for folder in runs(root)}


def without_clock(folder: RunFolder) -> dict[str, object]:
    assert folder.result is not None
    return {k: v for k, v in folder.result.items() if k not in ("seconds", "finished")}


def test_a_suite_isolates_failures_and_says_what_to_do(
    fedlens: Call, table: str, tmp_path: Path
) -> None:
    code, out, err = fedlens("suite", table, *SMALL, "--seeds", "2")
    assert code == 2
    assert "2 failed" in err
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["central", "ridge", "broken", "federated"]
    assert "±" in lines[1]
    assert "failed" in lines[3]
    assert "failed: broken, seed 1: The loss became" in out
    repeat = next(line for line in lines if line.strip().startswith("run it again:"))
    assert repeat.split("run it again: ")[1].startswith(
        "fedlens run quickstart train.epochs=2 train.lr=1e30"
    )
    assert repeat.endswith("seed=0")
    assert "fedlens report runs --out report" in out
    assert "started: central, seed 0" in err
    assert len(results(Path("runs"))) == 8
    assert len(list(Path("runs").glob("*/arithmetic/alpha-*/record.json"))) == 2
    stamps = {path: path.stat().st_mtime_ns for path in Path("runs").glob("*/result.json")}
    code, out, err = fedlens("suite", table, *SMALL, "--only", "RIDGE", "--only", "fed")
    assert code == 0
    assert "(1 seed)" in out
    assert "started: ridge" not in err  # finished runs are skipped
    code, _, err = fedlens("suite", table, *SMALL)
    assert code == 2
    assert "failed before and runs again" in err
    assert stamps == {path: path.stat().st_mtime_ns for path in Path("runs").glob("*/result.json")}


def test_analyses_of_a_run_that_sections_share_are_all_made(
    fedlens: Call, table: str, tmp_path: Path
) -> None:
    words = f"quickstart_fedavg {FEDERATION}"
    for name, analysis in (("a", "0,1"), ("b", "0,1,2"), ("c", "0,1")):
        text = f"rows: {{it: {words}}}\nanalyses: {{'alpha --alphas {analysis}': [it]}}"
        (tmp_path / f"{name}.yaml").write_text(text)
    (tmp_path / "all.yaml").write_text("sections: {a: a.yaml, b: b.yaml, c: c.yaml}")
    code, _, err = fedlens("suite", "all.yaml", *SMALL)
    assert code == 0, err
    assert len(list(Path("runs").glob("*/arithmetic/alpha-*/record.json"))) == 2
    assert err.count("started: alpha") == 2


def test_a_dry_run_writes_nothing_but_its_timings(
    fedlens: Call, table: str, tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDLENS_CACHE", str(tmp_path / "cache"))
        patch.setattr("fedlens.suites.estimates.probe.TIMED_S", 0.01)
        code, out, _ = fedlens("suite", table, *SMALL, "--dry-run", "--jobs", "2")
        _, jobs, _ = fedlens("suite", table, *SMALL, "--dry-run", "--launcher", "slurm")
    assert code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"mine.yaml", "cache"}
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["estimates"]
    assert re.search(r"4 of 4 runs( and \d+ analys[ei]s)? to do: about", out)
    assert ", 2 at a time" in out
    assert "estimate" in out
    assert ", 4 at a time" in jobs
    rows = {line.split(",")[0]: line for line in out.splitlines()}
    assert "2 epochs" in rows["central"]
    assert "0 epochs" in rows["ridge"]
    assert "2 rounds" in rows["federated"]
    assert "new" in rows["broken"]


def test_mistakes_are_refused_before_anything_runs(
    fedlens: Call, table: str, tmp_path: Path
) -> None:
    for words, complaint in [
        (["--only", "nonsense"], "matches no run"),
        (["train.lrr=1"], "did you mean 'train.lr'"),
        (["--launcher", "local", "--slurm", "nonsense=1"], "nonsense"),
        (["--slurm", "partition=gpu"], "add --launcher slurm"),
        (["run.name=all"], "leave it out"),
        (["+train.lr=1"], "keys are fixed"),
    ]:
        code, _, err = fedlens("suite", table, *SMALL, *words)
        assert (code, complaint in err) == (2, True), err
    for analysis, complaint in [
        ("alfa", "'alfa' is not a known analysis: did you mean"),
        ("alpha --base", "base"),
    ]:
        (tmp_path / "mine.yaml").write_text(TABLE.replace("alpha --alphas 0,1", analysis))
        code, _, err = fedlens("suite", table, *SMALL)
        assert (code, complaint in err) == (2, True), err
    assert not Path("runs").exists() or not runs(Path("runs"))


def test_workers_give_the_same_bits_as_one_process(
    fedlens: Call, table: str, tmp_path: Path
) -> None:
    code, _, _ = fedlens("suite", table, *SMALL, "run.root=alone")
    assert code == 2
    code, out, _ = fedlens("suite", table, *SMALL, "run.root=many", "--jobs", "2")
    assert code == 2
    assert "failed: broken, seed 0: The loss became" in out
    assert results(Path("many")) == results(Path("alone"))
    assert sum(result is not None for result in results(Path("many")).values()) == 3
    records = [
        [json.loads(path.read_text()) for path in Path(root).glob("*/arithmetic/*/record.json")]
        for root in ("alone", "many")
    ]
    assert records[0] == records[1]
    assert len(records[0]) == 1


def test_a_stopped_suite_is_resumed_by_the_same_command(
    fedlens: Call, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = run.start

    def interrupted(config: object, **how: object) -> RunFolder:
        os.kill(os.getpid(), signal.SIGINT)
        return begin(config)  # type: ignore[arg-type]

    words = ["suite", table, *SMALL, "--only", "central", "--only", "ridge"]
    with monkeypatch.context() as patch:
        patch.setattr(run, "start", interrupted)
        code, _, err = fedlens(*words)
    assert code == 75
    assert "run the same command again to resume: fedlens suite mine.yaml" in err
    assert fedlens(*words)[0] == 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_killed_suite_resumes_to_the_same_results(
    fedlens: Call, table: str, tmp_path: Path
) -> None:
    words = ["suite", table, *SMALL, "--only", "central", "--only", "federated"]
    assert fedlens(*words, "run.root=whole")[0] == 0
    command = [sys.executable, "-m", "fedlens.cli", *words, "run.root=cut"]
    with (tmp_path / "log").open("w") as log:
        killed = subprocess.Popen(command, stderr=log, stdout=log)
    while not list(Path("cut").glob("*/metrics.jsonl")) and killed.poll() is None:
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    assert fedlens(*words, "run.root=cut")[0] == 0
    assert results(Path("cut")) == results(Path("whole"))
    pairs = zip(runs(Path("cut")), runs(Path("whole")), strict=True)
    assert all(without_clock(cut) == without_clock(whole) for cut, whole in pairs)
