import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens import params
from fedlens.errors import FedlensError
from fedlens.federated.client import LocalTraining, Trainer
from fedlens.federated.engines.parallel import ATTEMPTS, Parallel
from fedlens.federated.engines.serial import Serial
from fedlens.federated.tasks import ClientTask, ClientUpdate
from fedlens.params import Params
from tests.federated.small import answers, examples, local_training, network, shards, tasks

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="stand-ins live on by forking")

SEED = 2
SIZES = [3, 8, 5, 4, 7, 2, 6, 5]
ASKED = tasks(SIZES, steps=[1, 9, 2, 4, 3, 8, 1, 2])
GIVEN = local_training(momentum=0.9, step={"dropout": 0.2})
Train = Callable[[Trainer, ClientTask, Params], ClientUpdate]


def trainer(given: LocalTraining = GIVEN) -> Trainer:
    return Trainer(network(), examples(), shards(SIZES).shard, given, SEED)


def start() -> dict[str, torch.Tensor]:
    return params.copy(dict(network().named_parameters()))


Expected = Any
Open = Callable[..., Parallel]


@pytest.fixture(scope="module")
def expected() -> Expected:
    return answers(Serial(trainer(), 1), start(), ASKED)


@pytest.fixture
def parallel() -> Iterator[Open]:
    """Engines that are closed whatever happens."""
    opened: list[Parallel] = []

    def make(workers: int = 2, given: LocalTraining = GIVEN) -> Parallel:
        opened.append(Parallel(trainer(given), workers=workers, threads=1))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


def stand_in(patch: pytest.MonkeyPatch, before: Callable[[ClientTask], None]) -> None:
    """Workers started from now on call `before` when they are about to train a client."""
    real: Train = Trainer.train

    def train(self: Trainer, task: ClientTask, parameters: Params) -> ClientUpdate:
        before(task)
        return real(self, task, parameters)

    patch.setattr(Trainer, "train", train)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_give_the_same_bits_in_the_same_order(
    workers: int, parallel: Open, expected: Expected
) -> None:
    assert answers(parallel(workers), start(), ASKED) == expected


def test_corrections_and_proximal_terms_reach_the_workers(parallel: Open) -> None:
    draw = torch.Generator().manual_seed(0)
    asked = [
        replace(
            one, correction={n: torch.randn(v.shape, generator=draw) for n, v in start().items()}
        )
        for one in ASKED
    ]
    given = local_training(proximal=0.4)
    expected = answers(Serial(trainer(given), 1), start(), asked)
    engine = parallel(given=given)
    assert answers(engine, start(), asked) == expected
    free = answers(Serial(trainer(given), 1), start(), ASKED)  # old corrections are forgotten
    assert free != expected
    assert answers(engine, start(), ASKED) == free


def test_rounds_go_to_the_same_workers_with_new_parameters(
    parallel: Open, expected: Expected
) -> None:
    engine = parallel()
    workers = [worker.process.pid for worker in engine.workers]
    other = {name: value * 0.5 for name, value in start().items()}
    elsewhere = answers(Serial(trainer(), 1), other, ASKED)
    for _ in range(3):
        assert answers(engine, start(), ASKED) == expected
        assert answers(engine, other, ASKED) == elsewhere
        assert answers(engine, start(), []) == []
    assert [worker.process.pid for worker in engine.workers] == workers


def test_a_slow_client_keeps_its_place(
    parallel: Open, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, lambda task: time.sleep(0.4 * (task.client == 0)))
    assert answers(parallel(), start(), ASKED) == expected


def test_a_diverging_client_is_a_fault_there_too(parallel: Open) -> None:
    asked = [replace(one, lr=1e38 if one.client == 1 else one.lr) for one in ASKED]
    expected = answers(Serial(trainer(), 1), start(), asked)
    found = answers(parallel(), start(), asked)
    assert [one[0] for one in found if one[3]] == [1]
    assert found == expected


def test_a_worker_that_is_killed_is_replaced_and_nothing_else_changes(
    parallel: Open,
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def die_once(task: ClientTask) -> None:
        marker = tmp_path / str(task.client)
        if task.client in (0, 4) and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    stand_in(monkeypatch, die_once)
    engine = parallel()
    with caplog.at_level(logging.WARNING):
        assert answers(engine, start(), ASKED) == expected
    assert "worker of client 0 died (exit code -9)" in caplog.text
    assert "worker of client 4 died (exit code -9)" in caplog.text
    assert len(list(tmp_path.iterdir())) == 2
    assert answers(engine, start(), ASKED) == expected
    assert len(multiprocessing.active_children()) == 2


def test_a_worker_that_dies_between_rounds_is_replaced(parallel: Open, expected: Expected) -> None:
    engine = parallel()
    assert answers(engine, start(), ASKED) == expected
    victim = engine.workers[0].process
    victim.kill()
    victim.join()
    assert answers(engine, start(), ASKED) == expected
    assert all(worker.process.is_alive() for worker in engine.workers)


def test_a_client_that_always_kills_its_worker_ends_the_run_in_words(
    parallel: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def die(task: ClientTask) -> None:
        if task.client == 2:
            with (tmp_path / "deaths").open("a") as log:
                log.write("x")
            os.kill(os.getpid(), signal.SIGKILL)

    stand_in(monkeypatch, die)
    with pytest.raises(FedlensError, match=r"Client 2 ended its worker 3 times .*exit code -9"):
        answers(parallel(), start(), ASKED)
    assert (tmp_path / "deaths").read_text() == "x" * ATTEMPTS


@pytest.mark.parametrize("error", [FedlensError("out of order"), RuntimeError("out of order")])
def test_an_exception_in_a_worker_reaches_the_caller(
    error: Exception, parallel: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(task: ClientTask) -> None:
        if task.client == 3:
            raise error

    stand_in(monkeypatch, fail)
    with pytest.raises(type(error), match="out of order"):
        answers(parallel(), start(), ASKED)


def test_closing_leaves_no_process_behind(parallel: Open) -> None:
    assert multiprocessing.active_children() == []
    engine = parallel(3)
    assert len(multiprocessing.active_children()) == 3
    first = next(engine.updates(start(), ASKED))  # in the middle of a round
    assert first.task.client == 0
    engine.close()
    assert multiprocessing.active_children() == []
    engine.close()  # twice is once


def _doomed(pipe: Connection) -> None:
    """A main process that is killed while its workers are busy."""
    engine = Parallel(trainer(), workers=2, threads=1)
    pipe.send([worker.process.pid for worker in engine.workers])
    for _ in engine.updates(start(), ASKED):
        pass


def _runs(pid: int) -> bool:
    """Whether the process still does anything: a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
def test_workers_end_when_the_main_process_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def dawdle(task: ClientTask) -> None:
        (tmp_path / str(task.client)).touch()
        time.sleep(60)

    stand_in(monkeypatch, dawdle)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    main = context.Process(target=_doomed, args=(theirs,))
    main.start()
    workers = ours.recv()
    try:
        within(20, lambda: len(list(tmp_path.iterdir())) == 2)  # both are at work
        assert all(_runs(pid) for pid in workers)
    finally:
        main.kill()
        main.join()
    within(20, lambda: not any(_runs(pid) for pid in workers))
    ours.close()
    theirs.close()


def within(seconds: float, true: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_masked_parameters_travel_packed_and_give_the_same_bits() -> None:
    masks = {"backbone.0.weight": torch.arange(48).view(8, 6) % 3 == 0}
    shard = shards(SIZES).shard
    masked = [Trainer(network(), examples(), shard, GIVEN, SEED, masks=masks) for _ in "12"]
    packed = params.copy(masked[0].packed())
    assert packed["backbone.0.weight"].shape == (16,)
    engine = Parallel(masked[1], workers=2, threads=1)
    try:
        assert answers(engine, packed, ASKED) == answers(Serial(masked[0], 1), packed, ASKED)
    finally:
        engine.close()
