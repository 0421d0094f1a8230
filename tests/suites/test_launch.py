"""How jobs of a suite are carried out: in turn, on workers that may die, submitted to a cluster."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from submitit.core.utils import FailedSubmissionError

from fedlens.errors import FedlensError
from fedlens.files import write_json
from fedlens.runtime.stop import Interrupted, StopRequest, listening
from fedlens.store.run_folder import RunFolder
from fedlens.suites.eta import Eta, Parts
from fedlens.suites.launch import Job, attempt, run_in_turn
from fedlens.suites.slurm import Command, make_executor, parse_options, submit_all
from fedlens.suites.workers import Workers

SECONDS = 60  # that nothing here takes, unless it hangs


def make_jobs(folder: Path, calls: dict[str, Callable[[], object]]) -> list[Job]:
    return [
        Job(label, ["run", label], call, RunFolder(folder / label)) for label, call in calls.items()
    ]


def make_eta(jobs: list[Job]) -> Eta:
    return Eta({job.label: Parts({"steps": 1.0}) for job in jobs}, {})


def refuse() -> None:
    raise FedlensError("it would not")


def break_down() -> None:
    raise ZeroDivisionError


def stop_here() -> None:
    raise Interrupted("SIGTERM")


def write_threads(path: Path) -> None:
    path.write_text(str(torch.get_num_threads()))


def die(number: int) -> None:
    os.kill(os.getpid(), number)


def leave(code: int) -> None:
    os._exit(code)


def until_stopped(path: Path) -> None:
    """As a run does: says that it is there, and saves itself when it is asked to stop."""
    with listening() as stop:
        path.with_suffix(".pid").write_text(str(os.getpid()))
        for _ in range(10 * SECONDS):
            time.sleep(0.1)
            if stop.name:
                path.write_text(stop.name)
                stop.check()


def appears(path: Path) -> bool:
    for _ in range(10 * SECONDS):
        if path.exists() and path.read_text():
            return True
        time.sleep(0.1)
    return False


def is_gone(process: int) -> bool:
    for _ in range(10 * SECONDS):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_a_failure_is_a_sentence_and_a_stop_is_none() -> None:
    assert attempt(lambda: 1) is None
    assert attempt(refuse) == "it would not"
    assert attempt(break_down) == "ZeroDivisionError"
    with pytest.raises(Interrupted):
        attempt(stop_here)


def test_one_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    jobs = make_jobs(tmp_path, {"a": refuse, "b": break_down, "c": int})
    found = [(o.job.label, o.failure) for o in run_in_turn(jobs, make_eta(jobs), StopRequest())]
    assert found == [("a", "it would not"), ("b", "ZeroDivisionError"), ("c", None)]


def test_the_threads_of_one_run_are_not_the_next_ones(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    calls = {
        "a": partial(torch.set_num_threads, before + 2),
        "b": partial(write_threads, tmp_path / "threads"),
    }
    jobs = make_jobs(tmp_path, calls)
    assert len(list(run_in_turn(jobs, make_eta(jobs), StopRequest()))) == 2
    assert (tmp_path / "threads").read_text() == str(before)


def test_a_stop_request_between_two_runs_is_heard(tmp_path: Path) -> None:
    stop = StopRequest()
    jobs = make_jobs(tmp_path, {"a": int, "b": int})
    outcomes = run_in_turn(jobs, make_eta(jobs), stop)
    assert next(outcomes).job.label == "a"
    stop.name = "SIGINT"
    with pytest.raises(Interrupted):
        next(outcomes)


def test_a_request_that_comes_too_late_for_a_run_is_for_the_suite(tmp_path: Path) -> None:
    def finish() -> None:
        with listening():
            os.kill(os.getpid(), signal.SIGINT)  # after the run's last check

    jobs = make_jobs(tmp_path, {"a": finish, "b": int})
    with listening() as stop:
        outcomes = run_in_turn(jobs, make_eta(jobs), stop)
        assert next(outcomes).failure is None
        assert stop.name == "SIGINT"
        with pytest.raises(Interrupted):
            next(outcomes)
        with pytest.raises(KeyboardInterrupt):  # the second does not wait
            os.kill(os.getpid(), signal.SIGINT)


def test_a_run_nobody_stopped_stops_nobody() -> None:
    with listening() as stop:
        with listening():
            pass
        assert stop.name is None
        os.kill(os.getpid(), signal.SIGTERM)
        with listening():
            pass
        assert stop.name == "SIGTERM"


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(2, threads=1) as found:
        yield found


@pytest.mark.slow
def test_a_worker_that_dies_is_one_failed_run_and_the_others_finish(
    workers: Workers, tmp_path: Path
) -> None:
    """By a signal, by an exit; three deaths use up both workers, so they are replaced."""
    jobs = make_jobs(
        tmp_path,
        {
            "killed": partial(die, signal.SIGKILL),
            "refused": refuse,
            "broken": partial(die, signal.SIGSEGV),
            "left": partial(leave, 3),
            **{str(n): partial(write_threads, tmp_path / str(n)) for n in range(3)},
        },
    )
    found = {o.job.label: o.failure for o in workers.run(jobs, make_eta(jobs), StopRequest())}
    assert found.keys() == {job.label for job in jobs}
    assert "ended by SIGKILL, often for lack of memory" in (found["killed"] or "")
    assert "ended by SIGSEGV" in (found["broken"] or "")
    assert "exit code 3" in (found["left"] or "")
    assert found["refused"] == "it would not"
    assert all(found[str(n)] is None for n in range(3))
    assert {(tmp_path / str(n)).read_text() for n in range(3)} == {"1"}
    again = make_jobs(tmp_path, {"later": int})  # the same workers take what comes afterwards
    assert [o.failure for o in workers.run(again, make_eta(again), StopRequest())] == [None]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stop_request_lets_workers_save_and_starts_nothing_more(
    number: int, workers: Workers, tmp_path: Path
) -> None:
    """Even if the server they come from gets the signal too, or is gone."""
    stop = StopRequest()
    jobs = make_jobs(
        tmp_path,
        {"quick": int, **{str(n): partial(until_stopped, tmp_path / str(n)) for n in range(3)}},
    )
    outcomes = workers.run(jobs, make_eta(jobs), stop)
    assert next(outcomes).job.label == "quick"

    def ask() -> None:
        assert appears(tmp_path / "0.pid")
        assert appears(tmp_path / "1.pid")
        os.kill(forkserver._forkserver._forkserver_pid, number)  # type: ignore[attr-defined]
        time.sleep(1)  # the suite hears of that first
        stop.name = "SIGINT"

    asking = threading.Thread(target=ask)
    asking.start()
    with pytest.raises(Interrupted):
        list(outcomes)
    asking.join()
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text() == "SIGTERM"
    assert not (tmp_path / "2.pid").exists()


PARENT = """
import sys
from functools import partial
from pathlib import Path
from tests.suites.test_launch import make_eta, make_jobs, until_stopped
from fedlens.suites.workers import Workers
from fedlens.runtime.stop import StopRequest

if __name__ == "__main__":
    where = Path(sys.argv[1])
    jobs = make_jobs(where, {"0": partial(until_stopped, where / "0")})
    with Workers(1, threads=1) as workers:
        list(workers.run(jobs, make_eta(jobs), StopRequest()))
"""


@pytest.mark.slow
def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    root = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"},
    )
    try:
        assert appears(tmp_path / "0.pid")
    finally:
        parent.kill()
        parent.wait()
    assert is_gone(int((tmp_path / "0.pid").read_text()))


def test_words_for_slurm_are_prefixed_where_submitit_wants_it() -> None:
    options = ["partition=gpu", "timeout_min=240", "slurm_qos=high", "mem_gb=8.5", "setup=[a, b]"]
    assert parse_options(options) == {
        "slurm_partition": "gpu",
        "timeout_min": 240,
        "slurm_qos": "high",
        "mem_gb": 8.5,
        "slurm_setup": ["a", "b"],
    }
    for wrong in ("partition", "=gpu", "partition="):
        with pytest.raises(FedlensError, match="form key=value"):
            parse_options([wrong])


def test_without_submitit_a_sentence_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(FedlensError, match=r"pip install 'fedlens\[slurm\]'"):
        make_executor("slurm", tmp_path, {})


def test_what_submitit_refuses_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(FedlensError, match="nonsense"):
        make_executor("local", tmp_path, parse_options(["nonsense=1"]))
    with pytest.raises(FedlensError, match="timeout_min"):
        make_executor("local", tmp_path, parse_options(["timeout_min=long"]))


def test_a_job_that_must_leave_asks_its_run_to_save_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As submitit does it: in the middle of the call, a signal's handler calls `checkpoint`."""
    script = tmp_path / "stand_in"
    script.write_text(
        "#!/bin/sh\n"
        f"trap 'echo saved > {tmp_path / 'saved'}; exit 75' TERM\n"
        f"echo $* > {tmp_path / 'began'}\n"
        "kill -USR2 $$\n"  # of which it must not die
        "while :; do sleep 0.05; done\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    job, again = Command(["run", "it"]), []

    def warned(number: int, frame: object) -> None:
        again.append(job.checkpoint())
        raise SystemExit

    before = signal.signal(signal.SIGALRM, warned)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.7)
        with pytest.raises(SystemExit):
            job()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert (tmp_path / "began").read_text().split() == ["-m", "fedlens.cli", "run", "it"]
    assert (tmp_path / "saved").read_text() == "saved\n"
    assert isinstance(again[0].function, Command)
    assert again[0].function.arguments == ["run", "it"]
    assert again[0].function.child is None


class Cluster:
    """A stand-in whose jobs end when they are looked at for the second time."""

    def __init__(self, folder: Path, alive: set[str], log: list[str]) -> None:
        self.folder = folder
        self.submissions: list[list[str]] = []
        self.most = 0
        self._executor = SimpleNamespace(job_class=partial(Submission, self))
        self.alive = alive
        self.log = log
        self.refuses = False

    def submit(self, command: Command) -> "Submission":
        if self.refuses:
            raise FailedSubmissionError("sbatch: error: no such partition\n\nsbatch: it is so\n")
        self.submissions.append(command.arguments)
        number = str(len(self.submissions))
        self.alive.add(number)
        self.most = max(self.most, len(self.alive))
        return Submission(self, self.folder, number)


class Submission:
    state = "FAILED"

    def __init__(self, cluster: Cluster, folder: Path, job_id: str) -> None:
        self.cluster, self.job_id, self.looks = cluster, job_id, 0
        self.paths = SimpleNamespace(stderr=folder / f"{job_id}.err")

    def done(self, force_check: bool = False) -> bool:
        self.looks += 1
        if self.looks > 1:
            self.cluster.alive.discard(self.job_id)
            for line in self.cluster.log:  # what a run says before its job ends
                write_json(Path(line), {"message": "its own word"})
        return self.job_id not in self.cluster.alive


def test_jobs_are_submitted_so_many_at_a_time_and_those_on_record_are_watched(
    tmp_path: Path,
) -> None:
    cluster: Any = Cluster(tmp_path, set(), [])
    jobs = make_jobs(tmp_path, {str(n): int for n in range(5)})
    cluster.alive.add("77")
    write_json(tmp_path / "3.json", {"job": "77", "arguments": []})  # not over yet
    write_json(tmp_path / "4.json", {"job": "78", "arguments": []})  # over
    for job in jobs[:4]:
        job.folder.path.mkdir()
        job.folder.write("result", {"units": 1})
    (tmp_path / "5.err").write_text("a line\nerror: it would not\nmore\n")
    (tmp_path / "4.err").write_text("error: it would not\n")
    found = {
        outcome.job.label: outcome.failure
        for outcome in submit_all(jobs, make_eta(jobs), StopRequest(), executor=cluster, at_once=2)
    }
    assert cluster.submissions == [["run", label] for label in ("0", "1", "2", "4")]
    assert cluster.most <= 3  # two of ours, and the one that was there
    assert found == {"0": None, "1": None, "2": None, "3": None, "4": "it would not"}
    assert json.loads((tmp_path / "4.json").read_text())["job"] == "4"


def test_a_job_without_a_word_is_told_with_its_log(tmp_path: Path) -> None:
    cluster: Any = Cluster(tmp_path, set(), [])
    jobs = make_jobs(tmp_path, {"silent": int, "spoken": int})
    for job in jobs:
        job.folder.path.mkdir()
        job.folder.write("failure", {"message": "of an earlier session"})
        os.utime(job.folder.path / "failure.json", (1, 1))
    cluster.log.append(str(jobs[1].folder.path / "failure.json"))
    found = [o.failure for o in submit_all(jobs, make_eta(jobs), StopRequest(), executor=cluster)]
    assert f"its log is {tmp_path / '1.err'}" in (found[0] or "")
    assert found[1] == "its own word"


def test_a_job_the_cluster_refuses_is_one_failed_run(tmp_path: Path) -> None:
    cluster: Any = Cluster(tmp_path, set(), [])
    cluster.refuses = True
    jobs = make_jobs(tmp_path, {"a": int, "b": int})
    found = [o.failure for o in submit_all(jobs, make_eta(jobs), StopRequest(), executor=cluster)]
    assert (
        found
        == ["The cluster refused the job: sbatch: error: no such partition; sbatch: it is so"] * 2
    )


def test_a_run_in_hand_is_waited_for_and_a_forgotten_job_is_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster: Any = Cluster(tmp_path, {"77"}, [])
    jobs = make_jobs(tmp_path, {"in hand": int, "left": int, "forgotten": int})
    for job in jobs:
        job.folder.path.mkdir()
    write_json(tmp_path / "forgotten.json", {"job": "77", "arguments": []})
    monkeypatch.setattr(Submission, "state", "UNKNOWN", raising=False)
    held = [job.folder.lock() for job in jobs[:2]]
    for lock in held:
        lock.__enter__()

    def finish() -> None:
        assert appears(tmp_path / "forgotten.json")
        jobs[0].folder.write("result", {"units": 1})
        for lock in held:
            lock.__exit__(None, None, None)

    ending = threading.Timer(0.5, finish)
    ending.start()
    found = {
        outcome.job.label: outcome.failure
        for outcome in submit_all(jobs, make_eta(jobs), StopRequest(), executor=cluster)
    }
    ending.join()
    assert cluster.submissions == [["run", "forgotten"]]
    assert found["in hand"] is None
    assert "left the run unfinished" in (found["left"] or "")


def test_a_stop_request_leaves_the_jobs_where_they_are(tmp_path: Path) -> None:
    cluster: Any = Cluster(tmp_path, set(), [])
    jobs, stop = make_jobs(tmp_path, {"a": int}), StopRequest()
    stop.name = "SIGINT"
    with pytest.raises(Interrupted):
        list(submit_all(jobs, make_eta(jobs), stop, executor=cluster))
