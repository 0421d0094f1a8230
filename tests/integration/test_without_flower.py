"""Flower is an optional extra: without it, its commands say so and all others work.

No `importorskip` here: these tests pass with and without it.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

REFUSED = [
    ("run", "quickstart_fedavg", "engine=flower"),
    ("run", "quickstart_fedavg", "engine=flower_simulation"),
    ("flower", "up"),
]
ALLOWED = ("config", "quickstart_fedavg", "engine=serial")
# A module that is None cannot be imported, like a package that is not installed. Every command is
# run in a process of its own, forked from one that has imported nothing of Flower but the rest.
WITHOUT = """
import contextlib, io, json, os, sys
sys.modules["flwr"] = sys.modules["ray"] = None
import fedlens.experiments.run
from fedlens.cli import main
outcomes = {}
for words in json.loads(sys.argv[1]):
    reading, writing = os.pipe()
    if os.fork() == 0:
        out, err, code = io.StringIO(), io.StringIO(), 0
        sys.argv = ["fedlens", *words]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as exit_:
                code = exit_.code or 0
        with os.fdopen(writing, "w") as pipe:
            json.dump({"code": code, "out": out.getvalue(), "err": err.getvalue()}, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        outcomes[" ".join(words)] = json.load(pipe)
    os.wait()
print(json.dumps({"outcomes": outcomes, "files": os.listdir()}))
"""


@pytest.fixture(scope="module")
def without_flower(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What becomes of the commands, and which files they leave."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, json.dumps([*REFUSED, ALLOWED])],
        cwd=tmp_path_factory.mktemp("without"),
        env=os.environ | {"COLUMNS": "200"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_without_flower_the_error_says_how_to_install_it(
    words: tuple[str, ...], without_flower: dict[str, Any]
) -> None:
    outcome = without_flower["outcomes"][" ".join(words)]
    assert outcome["code"] == 2, outcome["err"]
    assert "fedlens[flower]" in outcome["err"]
    assert "Traceback" not in outcome["err"]
    assert without_flower["files"] == []  # neither a run nor a federation was started


def test_commands_that_need_no_flower_work_without_it(without_flower: dict[str, Any]) -> None:
    outcome = without_flower["outcomes"][" ".join(ALLOWED)]
    assert outcome["code"] == 0, outcome["err"]
    assert "name: serial" in outcome["out"]
