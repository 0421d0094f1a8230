"""`fedlens flower`: its files, the processes it starts and ends, what it prints."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedlens[flower]'")

from tests.integration.conftest import TINY, Call

SPLIT = ["quickstart_fedavg", *TINY, "federated.clients=4"]
FEDLENS = str(Path(sys.executable).with_name("fedlens"))
TIMEOUT_S = 300.0  # several processes import torch, on a machine that may be busy


def processes_of(folder: Path) -> set[int]:
    """The processes whose command names this folder."""
    pids = set()
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if os.fsencode(folder) in place.read_bytes():
                pids.add(int(place.parent.name))
        except OSError:  # it has just ended
            continue
    return pids


@contextmanager
def started(*words: str, at: Path) -> Iterator[tuple["subprocess.Popen[bytes]", Callable[[], str]]]:
    """The command as a process, and a function that reads its output so far."""
    output = at / "output.txt"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [FEDLENS, *words],
            cwd=at,
            env=os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"},
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process, lambda: output.read_text("utf-8", errors="replace")
        finally:
            process.kill()
            process.wait(30)


def wait_until(condition: Callable[[], object], output: Callable[[], str]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, output()
        time.sleep(0.1)


def assert_ends_with_all_its_children(
    process: "subprocess.Popen[bytes]", folder: Path, output: Callable[[], str], *, fewest: int
) -> None:
    assert len(processes_of(folder)) >= fewest
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 75, output()
    assert "Traceback" not in output()
    wait_until(lambda: not processes_of(folder), lambda: str(processes_of(folder)))


def test_up_starts_a_federation_prints_its_logs_and_ends_all_processes(tmp_path: Path) -> None:
    folder = tmp_path / "federation"
    words = [*SPLIT, "--nodes", "1", "--address", "127.0.0.1:0", "--federation", str(folder)]
    with started("flower", "up", *words, at=tmp_path) as (process, output):
        wait_until(lambda: "Connected: 1 node" in output() or process.poll() is not None, output)
        assert "fedlens run quickstart_fedavg" in output()  # the command for another terminal
        for name in ("superlink", "node-0"):
            wait_until(
                lambda name=name: re.search(rf"^\[{name}\] \S", output(), re.MULTILINE), output
            )
        # Itself, the SuperLink and its executor, the node and its SuperNode.
        assert_ends_with_all_its_children(process, folder, output, fewest=5)
    assert not (tmp_path / "runs").exists()


def test_a_superlink_starts_with_the_written_data_and_keys(fedlens: Call, tmp_path: Path) -> None:
    folder = tmp_path / "federation"
    at = ["--federation", str(folder)]
    code, out, _ = fedlens("flower", "partition", *SPLIT, "--nodes", "2", *at)
    assert (code, out) == (0, f"{folder} now has the data of 2 nodes and the server.\n")
    code, out, _ = fedlens("flower", "partition", *SPLIT, "--nodes", "2", *at)
    assert (code, out) == (0, f"{folder} already has the data of 2 nodes and the server.\n")
    code, out, _ = fedlens("flower", "keys", "--nodes", "2", "--host", "lab", *at)
    assert code == 0
    assert "lab" in out
    keys = {path.name: path.stat().st_mode & 0o777 for path in (folder / "keys").iterdir()}
    assert keys.keys() == {"node-0", "node-0.pub", "node-1", "node-1.pub"}
    assert keys["node-0"] == keys["node-1"] == 0o600
    with started("flower", "superlink", "--address", "127.0.0.1:0", *at, at=tmp_path) as (
        process,
        output,
    ):
        wait_until(
            lambda: "listens at 127.0.0.1:" in output() or process.poll() is not None,
            output,
        )
        assert_ends_with_all_its_children(process, folder, output, fewest=3)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["partition", *SPLIT, "--nodes", "5"], "nodes=5 is more than the 4 clients"),
        (["partition", *SPLIT, "--nodes", "0"], "--nodes 0 must be in [1, 10000]"),
        (["keys", "--nodes", "-1"], "--nodes -1 must be in [1, 10000]"),
        (["keys", "--host", ""], "--host has no value"),
        (["keys", "--host", "a b"], "'a b' is not a host"),
        (["node", "node-0", "--superlink", ""], "--superlink has no value"),
        (["node", "node-0", "--superlink", "x:99999"], "'x:99999' is not an address"),
        (["node", "../up"], "must be one plain folder name"),
        (["node", "node-0", "--threads", "1000000"], "--threads 1000000 must be in [1, 1024]"),
        (["node", "node-0", "--reconnect", "nan"], "--reconnect nan must be in [0, 1e7]"),
        (["partition", "quickstart", *TINY], "no clients"),
        (["up", *SPLIT, "--nodes", "5"], "nodes=5 is more than the 4 clients"),
        (["superlink"], "fedlens flower partition"),
        (["node", "node-0"], "superlink.json"),
    ],
)
def test_impossible_requests_are_refused_in_a_sentence(
    words: list[str], complaint: str, fedlens: Call, tmp_path: Path
) -> None:
    folder = tmp_path / "federation"
    assert_refused(fedlens("flower", *words, "--federation", str(folder)), complaint)
    assert not folder.exists()


def test_data_of_another_seed_do_not_overwrite_existing_ones(fedlens: Call, tmp_path: Path) -> None:
    at = ["--nodes", "2", "--federation", str(tmp_path / "federation")]
    assert fedlens("flower", "partition", *SPLIT, *at)[0] == 0
    assert_refused(fedlens("flower", "partition", *SPLIT, "seed=7", *at), "another federation")


def assert_refused(result: tuple[int, str, str], complaint: str) -> None:
    code, _, err = result
    assert code == 2, err
    (sentence,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert complaint in sentence
    assert err.endswith(f"{sentence}\n")  # and nothing after it
