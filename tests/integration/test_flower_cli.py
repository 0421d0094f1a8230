"""`fedlens flower` as one types it: what is dealt, made, started, shown, and gone afterwards."""

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
pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedlens[flower]'")

from tests.integration.conftest import TINY, Call

DEAL = ["quickstart_fedavg", *TINY, "federated.clients=4"]
FEDLENS = str(Path(sys.executable).with_name("fedlens"))
SOON = 120.0  # seconds: torch is imported, several times over


def concerned_with(folder: Path) -> set[int]:
    """The processes in whose command this folder is named."""
    found = set()
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if os.fsencode(folder) in place.read_bytes():
                found.add(int(place.parent.name))
        except OSError:  # it has just ended
            continue
    return found


@contextmanager
def started(*words: str, at: Path) -> Iterator[tuple["subprocess.Popen[bytes]", Callable[[], str]]]:
    """The command as a process, and what it has said so far."""
    shown = at / "shown.txt"
    with shown.open("wb") as stream:
        process = subprocess.Popen(
            [FEDLENS, *words],
            cwd=at,
            env=os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"},
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process, lambda: shown.read_text("utf-8", errors="replace")
        finally:
            process.kill()
            process.wait(30)


def until(so: Callable[[], object], said: Callable[[], str]) -> None:
    end = time.monotonic() + SOON
    while not so():
        assert time.monotonic() < end, said()
        time.sleep(0.1)


def assert_ends_with_all_its_children(
    process: "subprocess.Popen[bytes]", folder: Path, said: Callable[[], str], *, fewest: int
) -> None:
    assert len(concerned_with(folder)) >= fewest
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 75, said()
    assert "Traceback" not in said()
    until(lambda: not concerned_with(folder), lambda: str(concerned_with(folder)))


def test_up_starts_a_federation_shows_its_log_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "federation"
    words = [*DEAL, "--nodes", "2", "--address", "127.0.0.1:0", "--federation", str(folder)]
    with started("flower", "up", *words, at=tmp_path) as (process, said):
        until(lambda: "2 nodes are connected" in said() or process.poll() is not None, said)
        assert "fedlens run quickstart_fedavg" in said()  # what to type in another terminal
        for name in ("superlink", "node-0", "node-1"):
            until(lambda name=name: re.search(rf"^\[{name}\] \S", said(), re.MULTILINE), said)
        # Itself, the SuperLink and its executor, two nodes and their SuperNodes.
        assert_ends_with_all_its_children(process, folder, said, fewest=7)
    assert not (tmp_path / "runs").exists()


def test_parts_that_were_dealt_and_keys_that_were_made_serve_a_superlink(
    fedlens: Call, tmp_path: Path
) -> None:
    folder = tmp_path / "federation"
    at = ["--federation", str(folder)]
    code, said, _ = fedlens("flower", "partition", *DEAL, "--nodes", "2", *at)
    assert (code, said) == (0, f"{folder} holds the data of 2 nodes and the server.\n")
    code, said, _ = fedlens("flower", "partition", *DEAL, "--nodes", "2", *at)
    assert (code, said) == (0, f"{folder} held already the data of 2 nodes and the server.\n")
    code, said, _ = fedlens("flower", "keys", "--nodes", "2", "--host", "lab", *at)
    assert code == 0
    assert "lab" in said
    keys = {path.name: path.stat().st_mode & 0o777 for path in (folder / "keys").iterdir()}
    assert keys.keys() == {"node-0", "node-0.pub", "node-1", "node-1.pub"}
    assert keys["node-0"] == keys["node-1"] == 0o600
    with started("flower", "superlink", "--address", "127.0.0.1:0", *at, at=tmp_path) as (
        process,
        said_so_far,
    ):
        until(
            lambda: "listens at 127.0.0.1:" in said_so_far() or process.poll() is not None,
            said_so_far,
        )
        assert_ends_with_all_its_children(process, folder, said_so_far, fewest=3)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["partition", *DEAL, "--nodes", "5"], "5 nodes are more than the 4 clients"),
        (["partition", *DEAL, "--nodes", "0"], "at least 1 node"),
        (["partition", "quickstart", *TINY], "no clients"),
        (["up", *DEAL, "--nodes", "5"], "5 nodes are more than the 4 clients"),
        (["superlink"], "fedlens flower partition"),
        (["node", "node-0"], "superlink.json"),
    ],
)
def test_what_cannot_be_is_a_sentence(
    words: list[str], complaint: str, fedlens: Call, tmp_path: Path
) -> None:
    folder = tmp_path / "federation"
    assert_refused(fedlens("flower", *words, "--federation", str(folder)), complaint)
    assert not folder.exists()


def test_another_seed_does_not_go_over_data_that_were_dealt(fedlens: Call, tmp_path: Path) -> None:
    at = ["--nodes", "2", "--federation", str(tmp_path / "federation")]
    assert fedlens("flower", "partition", *DEAL, *at)[0] == 0
    assert_refused(fedlens("flower", "partition", *DEAL, "seed=7", *at), "another federation")


def assert_refused(found: tuple[int, str, str], complaint: str) -> None:
    code, _, said = found
    assert code == 2, said
    (sentence,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert complaint in sentence
    assert said.endswith(f"{sentence}\n")  # and nothing after it
