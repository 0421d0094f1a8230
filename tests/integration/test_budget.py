"""A tiny study under a budget: planned, interrupted, resumed, continued, refused."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from fedlens.cli.commands import suites
from fedlens.config.compose import load
from fedlens.config.schema import Config, rounds
from fedlens.store.run_folder import runs
from fedlens.suites.estimates.machines import Wanted
from tests.integration.conftest import TINY, Call

SMALL = [word for word in TINY if not word.startswith("train.")]
HEADS = "quickstart_fedavg train=head federated.clients=5 federated.participation=0.6"
SEED = ["--seeds", "1"]
STUDY = f"""
# Two tables of heads: the first is the headline.
budget:
  headline: [one]
  levels: [{{}}, {{steps: 1/2}}]
sections:
  one:
    rows: {{j: {HEADS} federated.local_step_budget=32}}
    columns: {{J=2: federated.local_steps=2, J=8: federated.local_steps=8}}
  two:
    rows:
      ridge: quickstart train=head head=ridge
      same as J=2: {HEADS} federated.local_step_budget=32 federated.local_steps=2
"""


class Fake:
    """A machine on which an image of a head takes as long as the test says."""

    memory = None
    each = 0.0

    def prepare(self, wanted: Sequence[Wanted]) -> None: ...

    def without_timing(self) -> "Fake":
        return self

    def __call__(self, config: Config, tasks: Collection[str]) -> Mapping[str, float]:
        return {task: self.each if task == "head" else 0.0 for task in tasks}

    def peak_memory(self, config: Config) -> int:
        return 1

    def sentence(self) -> str:
        return "Nothing was timed."


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.yaml").write_text(STUDY)
    monkeypatch.setattr(suites, "_machine", lambda *arguments, **settings: Fake())
    monkeypatch.setattr("fedlens.suites.plan.OVERHEAD_S", 100.0)  # of each run
    return "study.yaml"


def plan() -> dict[str, object]:
    [path] = Path("runs/plans").glob("study-*.yaml")
    content = yaml.safe_load(path.read_text())
    assert isinstance(content, dict)
    return content


def test_a_budget_is_planned_carried_out_and_continued(fedlens: Call, study: str) -> None:
    # Every run takes 100 s: two cells × three seeds, and the ridge head once.
    code, out, err = fedlens("suite", study, *SMALL, "--budget", "800s")
    assert code == 0, err
    assert "All runs: 16 px, J × rounds = 32" in out
    assert "2 runs were left out so far" in out
    assert len(runs(Path("runs"))) == 7
    assert plan()["level"] == {}
    assert plan()["left_out"] == ["two / ridge, seed 1", "two / ridge, seed 2"]
    finished = {path: path.stat().st_mtime_ns for path in Path("runs").glob("*/result.json")}

    code, out, err = fedlens("suite", study, *SMALL, "--budget", "800s")
    assert code == 0, err
    assert "left out so far" not in out
    assert len(runs(Path("runs"))) == 9
    assert (
        finished.items()
        <= {path: path.stat().st_mtime_ns for path in Path("runs").glob("*/result.json")}.items()
    )
    # The run that two tables share was made once and is in both.
    assert "same as J=2" in out


def test_an_analysis_counts_whichever_table_asks_for_it(fedlens: Call, study: str) -> None:
    """A run and its analysis take 100 s each, with three seeds 10 min."""
    run = f"{HEADS} federated.local_step_budget=32"
    Path(study).write_text(
        f"""
# Two tables of one run; the second has an analysis.
sections:
  one:
    rows: {{j: {run}}}
  two:
    rows: {{same: {run}}}
    analyses: {{alpha: [same]}}
"""
    )
    code, out, err = fedlens("suite", study, *SMALL, "--budget", "1h", "--dry-run")
    assert code == 0, err
    assert "3 runs: about 10 min" in out


def test_a_tight_budget_cuts_all_runs_alike(
    fedlens: Call, study: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spent() -> set[int]:
        configs = [load(folder.config) for folder in runs(Path("runs"))]
        federated = [config for config in configs if config.federated.clients]
        return {config.federated.local_steps * rounds(config) for config in federated}

    monkeypatch.setattr(Fake, "each", 0.4)
    code, out, err = fedlens("suite", study, *SMALL, *SEED, "--budget", "1000s")
    assert code == 0, err
    assert "as the suite sets" in out  # does not fit
    assert spent() == {16}
    # A later budget, however large, stays at this level.
    monkeypatch.setattr(Fake, "each", 0.0)
    code, _, err = fedlens("suite", study, *SMALL, *SEED, "--budget", "100h")
    assert code == 0, err
    assert spent() == {16}


def test_an_interrupted_plan_is_resumed_and_no_run_starts_after_its_time(
    fedlens: Call, study: str
) -> None:
    code, out, _ = fedlens("suite", study, *SMALL, *SEED, "--budget", "800s", "--dry-run")
    assert code == 0
    assert not Path("runs").exists()
    fedlens("suite", study, *SMALL, *SEED, "--budget", "800s")
    [path] = Path("runs/plans").iterdir()
    stored = plan()
    for folder in runs(Path("runs"))[:1]:
        (folder.path / "result.json").unlink()
    code, out, _ = fedlens("suite", study, *SMALL, *SEED, "--budget", "800s")
    assert "Resuming the plan" in out
    assert plan()["runs"] == stored["runs"]

    for folder in runs(Path("runs"))[:1]:
        (folder.path / "result.json").unlink()
    path.write_text(yaml.safe_dump({**stored, "used_seconds": 799.9999999}))
    code, out, _ = fedlens("suite", study, *SMALL, *SEED, "--budget", "800s")
    assert code == 0
    assert "is used up: 1 planned run was not started" in out


def test_what_cannot_be_planned_is_refused(fedlens: Call, study: str) -> None:
    for words, message in [
        (["--budget", "soon"], "'soon' is not a duration"),
        (["--budget", "50s"], "too short for any run"),
        (["--budget", "100h", "--launcher", "slurm"], "needs --jobs"),
        (["--budget", "100h", "--on", "t4"], "add --dry-run"),
    ]:
        code, _, err = fedlens("suite", study, *SMALL, *words)
        assert code == 2
        assert message in err
        assert "Traceback" not in err
