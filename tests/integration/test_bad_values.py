"""The commands themselves: a bad value is one sentence on stderr and exit code 2."""

from pathlib import Path

import pytest

from tests.integration.conftest import Call

LONG = "x" * 300
PATHS = [
    *(["ls", "--runs", path] for path in ("", LONG, "a\nb", "\udcff")),
    ["ls", "--runs="],
    ["show", "it", "--runs", LONG],
    ["records", LONG, "--out", "records.tar.xz"],
    ["report", LONG],
    ["masks", "show", LONG],
    ["export", "it", "--out", "", "--runs", "."],
    ["weights", "verify", "vit_pico", "--file", LONG],
    ["flower", "superlink", "--federation", LONG],
    ["flower", "partition", "quickstart_fedavg", "--nodes", "2", "--federation", LONG],
    ["data", "partition", "quickstart_fedavg", "--figure", "\udcff"],
    ["config", "quickstart", "--plugin", "~nobody-here/x.py"],
    ["data", "verify", "folder", "--root", "~nobody-here/x"],
    ["weights", "verify", "vit_pico", "--file", "~nobody-here/x"],
]
REFUSED = [
    *PATHS,
    ["config", "centralized", "threads=1000000"],
    ["config", "centralized", "threads=-1"],
    ["config", "centralized", "backbone.resolution=100000"],
    ["config", "centralized", f"run.name={'x' * 300}"],
    ["config", "centralized", "run.name=-rf"],
    ["config", "centralized", "run.root="],
    ["config", "centralized", "train.lr=nan"],
    ["config", "centralized", "train.lr=-inf"],
    ["config", "centralized", "train.lr=😀"],
    ["config", "centralized", "train.lr="],
    ["config", "centralized", "seed=[1]"],
    ["config", "centralized", "head={}"],
    ["config", "centralized", "train.optimizer.momentum=nan"],
    ["config", "centralized", "run.root=a\nb"],
    ["config", ""],
    ["run", ""],
    ["run", "centralized", "train.epochs=99999999999999999999"],
    ["suite", ""],
    ["suite", "quick", "--budget", "nan"],
    ["suite", "quick", "--budget", ""],
    ["suite", "quick", "--budget", "99999999999999d"],
    ["suite", "quick", "--dry-run", "--on", ""],
    ["tune", "quickstart", "--timeout", "nan"],
    ["tune", "quickstart", "--timeout", "-1"],
    ["tune", "quickstart", "--name", "-rf"],
    ["tune", "quickstart", "--name", ""],
    ["report", "runs", "--suite", ""],
    ["report", "runs", "--suite", "quick 'it"],
    ["flower", "keys", "--nodes", "-1"],
    ["flower", "keys", "--nodes", "100000000"],
    ["flower", "keys", "--host", ""],
    ["flower", "keys", "--host", "münchen"],
    ["flower", "partition", "quickstart_fedavg", "--nodes", "0"],
    ["suite", "quick", "--seeds", "0"],
    ["suite", "quick", "--seeds", "1000000000"],
    ["suite", "quick", "--jobs", "1000000000"],
    ["tune", "quickstart", "--trials", "0"],
    ["tune", "quickstart", "--seed", "99999999999"],
    ["flower", "keys", "--nodes", "many"],
]


@pytest.mark.parametrize("words", REFUSED, ids=lambda words: ascii(" ".join(words))[:60])
def test_a_bad_value_is_one_sentence_and_exit_code_2(
    words: list[str], fedlens: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = fedlens(*words)
    (line,) = err.strip().splitlines()
    assert (code, out) == (2, ""), err
    assert line.startswith("error: ")
    assert line.endswith((".", "?"))
    assert not list(tmp_path.iterdir())  # nothing was begun
