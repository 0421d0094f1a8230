"""Threads that wait give up their core, and a busy machine is noticed."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from fedlens.runtime import machine, shared_machine
from fedlens.runtime.shared_machine import CHOICES, SPINS, choose_waiting, warn_if_busy

# Prints what is set when torch is imported, which ends the process: torch itself takes seconds.
AT_TORCH = """
import json, os, sys
class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(json.dumps({key: os.environ[key] for key in CHOICES if key in os.environ}))
            sys.stdout.flush()
            os._exit(0)
sys.meta_path.insert(0, Stop())
"""
AS_PROGRAM = "from fedlens.cli import main\nsys.argv = ['fedlens', 'run', 'quickstart']\nmain()"
AS_LIBRARY = "import fedlens as fl\nfl.fedavg"


def at_torch(then: str, **own: str) -> dict[str, str]:
    """The settings of how threads wait at the moment torch is loaded."""
    environment = {key: value for key, value in os.environ.items() if key not in CHOICES}
    done = subprocess.run(
        [sys.executable, "-c", f"CHOICES = {CHOICES}\n{AT_TORCH}\n{then}"],
        env=environment | own, capture_output=True, text=True, check=True,
    )  # fmt: skip
    settings: dict[str, str] = json.loads(done.stdout)
    return settings


@pytest.mark.slow
def test_the_program_sets_it_before_torch_is_loaded() -> None:
    assert at_torch(AS_PROGRAM) in (
        {"OMP_WAIT_POLICY": "PASSIVE"},
        {"GOMP_SPINCOUNT": str(SPINS)},
    )


def test_the_library_leaves_the_environment_alone() -> None:
    assert at_torch(AS_LIBRARY) == {}


@pytest.mark.parametrize("name", CHOICES)
def test_what_the_user_has_set_is_kept(name: str) -> None:
    environment = {name: "their own"}
    choose_waiting(environment)
    assert environment == {name: "their own"}


@pytest.mark.parametrize(
    ("cores", "allowed", "others", "sleep"),
    [(2, 2, 0, False), (2, 2, 1, True), (64, 8, 10, False), (64, 8, 60, True), (8, 8, None, True)],
    ids=["idle", "beside one", "room for all", "no room", "not Linux, by the load average"],
)
def test_threads_sleep_only_where_they_and_others_need_more_cores_than_there_are(
    monkeypatch: pytest.MonkeyPatch, cores: int, allowed: int, others: int | None, sleep: bool
) -> None:
    faked(monkeypatch, load=3.0, running=others, cores=cores)
    monkeypatch.setattr(machine, "cores_allowed", lambda: allowed)
    environment: dict[str, str] = {}
    choose_waiting(environment)
    assert (environment == {"OMP_WAIT_POLICY": "PASSIVE"}) == sleep


def test_a_program_that_runs_for_a_moment_is_not_a_busy_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moments = iter([0, 3, 0, 0, 1])
    faked(monkeypatch, load=0.0, running=0)
    monkeypatch.setattr(shared_machine, "_running", lambda: next(moments))
    monkeypatch.setattr(machine, "cores_allowed", lambda: 2)
    environment: dict[str, str] = {}
    choose_waiting(environment)
    assert environment == {"GOMP_SPINCOUNT": str(SPINS)}


@pytest.fixture(autouse=True)
def _not_looked_yet() -> Iterator[None]:
    warn_if_busy.cache_clear()
    yield
    warn_if_busy.cache_clear()


def faked(
    monkeypatch: pytest.MonkeyPatch, *, load: float, running: int | None, cores: int = 2
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(shared_machine, "SAMPLE_S", 0.0)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    monkeypatch.setattr(shared_machine, "_running", lambda: running)


@pytest.mark.parametrize(
    ("load", "running", "warned"),
    [(3.5, 5, True), (3.5, None, True), (1.5, 5, False), (3.5, 1, False)],
    ids=["busy", "busy, not Linux", "since a moment", "until a moment ago"],
)
def test_a_machine_is_busy_if_its_load_exceeds_its_cores(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    load: float,
    running: int | None,
    warned: bool,
) -> None:
    faked(monkeypatch, load=load, running=running)
    with caplog.at_level(logging.WARNING, "fedlens"):
        warn_if_busy()
        warn_if_busy()  # a process says it once
    assert len(caplog.messages) == warned
    if warned:
        assert "load 3.5 on 2 cores" in caplog.text
        assert "threads=1" in caplog.text


def test_without_a_load_average_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(os, "getloadavg", raising=False)
    monkeypatch.setattr(shared_machine, "_running", lambda: None)
    warn_if_busy()
    assert not caplog.messages


def test_the_first_run_of_a_process_looks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from typer.testing import CliRunner

    from fedlens.cli import app

    faked(monkeypatch, load=9.0, running=9)
    monkeypatch.setitem(sys.modules, "fedlens.experiments.run", None)  # nothing is to be trained
    with caplog.at_level(logging.WARNING, "fedlens"):
        CliRunner().invoke(app, ["run", "quickstart"])
        CliRunner().invoke(app, ["run", "quickstart"])
    assert caplog.text.count("load 9.0 on 2 cores") == 1
