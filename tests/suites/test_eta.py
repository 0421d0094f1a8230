"""The time left of a suite, with a clock and jobs of known durations."""

import heapq
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from fedlens.store.run_folder import RunFolder
from fedlens.suites.estimates.cost import OVERHEAD_S
from fedlens.suites.eta import Eta, Factors, Observed, Parts, makespan
from fedlens.suites.progress import time_left_text


def costs(of: Mapping[str, float]) -> dict[str, Parts]:
    """Jobs with steps of one kind."""
    return {label: Parts({"train": cost}) for label, cost in of.items()}


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


def journal(folder: RunFolder, done: int) -> None:
    folder.path.mkdir(exist_ok=True)
    folder.journal("metrics").append({"round": done, "validation": {"top1": 0.5}})


def test_the_time_left_is_learned_from_what_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second of overhead each; 10 units took 20 s more, so 2 s per unit."""
    clock = Clock(monkeypatch)
    eta = Eta(costs({"a": 10.0, "b": 30.0, "c": 5.0}), {"a": 4, "b": 4, "c": 4}, jobs=1)
    first, second = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    assert eta.seconds_left() is None
    eta.start("a", first)
    assert eta.seconds_left() is None
    clock.now = 11.0
    journal(first, 2)
    assert eta.seconds_left() == pytest.approx(10 + (1 + 60) + (1 + 10))  # half of a, then b and c
    clock.now = 21.0
    eta.end("a")
    assert eta.seconds_left() == pytest.approx(61 + 11)
    eta.start("b", second)
    journal(second, 1)
    clock.now = 21.0 + 16.0  # a quarter of b's 30 units in 15 s: still 2 s each
    assert eta.seconds_left() == pytest.approx(45 + 11)
    assert eta.active() == [("b", 1, 4)]
    clock.now = 21.0 + 61.0
    eta.end("b")
    eta.start("c", RunFolder(tmp_path / "c"))
    eta.end("c")
    assert (eta.finished, eta.seconds_left()) == (3, 0.0)


def test_what_an_earlier_session_did_says_nothing_of_the_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, folder = Clock(monkeypatch), RunFolder(tmp_path / "a")
    journal(folder, 2)
    eta = Eta(costs({"a": 8.0, "b": 8.0}), {"a": 4, "b": 4})
    eta.start("a", folder)
    clock.now = 9.0  # the other half of 8 units: 2 s each
    journal(folder, 4)
    eta.end("a")
    assert eta.seconds_left() == pytest.approx(1 + 16)


def test_a_run_that_failed_says_nothing_of_the_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    eta = Eta(costs({"a": 8.0, "b": 8.0, "c": 8.0}), {"a": 4, "b": 4, "c": 4})
    for label, seconds, failed in (("a", 17.0, False), ("b", 0.5, True)):
        eta.start(label, RunFolder(tmp_path / label))
        clock.now += seconds
        eta.end(label, failed=failed)
    assert eta.finished == 2
    assert eta.seconds_left() == pytest.approx(1 + 16)  # as a was: 2 s each


def test_several_at_once_take_less_time_but_not_less_than_the_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    eta = Eta(costs({"a": 1.0, "b": 100.0, "c": 1.0}), {"a": 1, "b": 10, "c": 1}, jobs=2)
    for label in ("a", "b"):
        eta.start(label, RunFolder(tmp_path / label))
    clock.now = 3.0
    eta.end("a")
    assert eta.seconds_left() == pytest.approx(200)


def test_a_line_cut_short_is_not_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.position() == 0
    journal(folder, 3)
    with folder.journal("metrics").path.open("a") as stream:
        stream.write('{"round": 4')
    assert folder.position() == 3


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("in_seconds", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_after_a_fifth_the_time_left_is_right_within_thirty_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int, in_seconds: bool, seed: int
) -> None:
    """Steps take other times than predicted: training 1.8, evaluation 0.6, calibration 4 times.

    The jobs are a suite's in their order: heads first, then dense and sparse runs of several
    lengths at each of three seeds, then analyses.
    """
    draw, clock = random.Random(seed), Clock(monkeypatch)
    truth = {"train": 1.8, "evaluate": 0.6, "calibrate": 4.0, "small train": 1.2}
    unit = 1.0 if in_seconds else 37.0  # costs are seconds, or of no unit at all
    parts: dict[str, Parts] = {}
    for number in range(3):
        for place in range(12):
            kind = "small train" if place < 4 else "train"
            own = {kind: draw.uniform(50, 400), "evaluate": draw.uniform(10, 200)}
            first = {"calibrate": draw.uniform(20, 60)} if place % 2 else {}
            parts[f"run {number} {place}"] = Parts(own, first)
    for place in range(6):
        parts[f"analysis {place}"] = Parts({"evaluate": draw.uniform(50, 300)})
    totals = {label: 10 for label in parts if label.startswith("run")}

    def seconds(costs: Mapping[object, float]) -> float:
        return sum(truth[str(kind)] * cost for kind, cost in costs.items())

    durations = {
        label: OVERHEAD_S + seconds(part.between(0, 1, ended=True)) for label, part in parts.items()
    }
    eta = Eta(
        {
            label: Parts(*({k: c * unit for k, c in of.items()} for of in (part.own, part.first)))
            for label, part in parts.items()
        },
        totals,
        jobs=jobs,
        in_seconds=in_seconds,
    )
    whole = makespan(list(durations.values()), jobs)
    running: list[tuple[float, str]] = []
    waiting = list(durations)
    started: dict[str, float] = {}
    errors: list[float] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            label = waiting.pop(0)
            started[label] = clock.now
            eta.start(label, RunFolder(tmp_path / label))
            heapq.heappush(running, (clock.now + durations[label], label))
        ends, label = heapq.heappop(running)
        for now in (clock.now + (ends - clock.now) / 2, ends):
            clock.now = now
            for other, since in started.items():
                if other in totals and other in eta.running:
                    first = OVERHEAD_S + seconds(parts[other].first)
                    done = int(10 * (now - since - first) / (durations[other] - first))
                    if done > 0:
                        journal(RunFolder(tmp_path / other), min(done, 10))
            if 0.2 * whole <= now < 0.95 * whole:
                left = eta.seconds_left()
                assert left is not None
                errors.append(abs(now + left - whole) / (whole - now))
        eta.end(label)
        started.pop(label)
    assert eta.seconds_left() == 0
    assert errors
    assert max(errors[: len(errors) // 2]) < 0.3
    assert sum(errors) / len(errors) < 0.2


def test_factors_of_kinds_are_found_where_jobs_mix_them() -> None:
    """Jobs of 2·a + 5·b seconds; the prior is worth little."""
    mixtures = [(10.0, 1.0), (1.0, 10.0), (5.0, 5.0), (8.0, 2.0)]
    observed = [Observed(2 * a + 5 * b, {"a": a, "b": b}) for a, b in mixtures]
    factors = Factors(observed, 1e-6)
    assert factors.of == pytest.approx({"a": 2.0, "b": 5.0}, rel=0.02)
    assert factors.seconds({"a": 3.0, "never seen": 1.0}) == pytest.approx(6 + factors.mean, 0.02)


def test_what_was_hardly_seen_follows_the_others() -> None:
    """All together: 29 s for 10.001, so 2.9; b alone would be 9000, and is (29 + 9) / 10.001."""
    observed = [Observed(20.0, {"a": 10.0}), Observed(9.0, {"b": 0.001})]
    assert Factors(observed, 10.0).of["b"] == pytest.approx(3.8, rel=0.01)


def test_timed_steps_tell_the_time_left_before_anything_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    eta = Eta(costs({"a": 10.0, "b": 30.0}), {"a": 4}, in_seconds=True)
    assert eta.seconds_left() == pytest.approx(42)
    eta.start("a", RunFolder(tmp_path / "a"))
    clock.now = 5.0
    assert eta.seconds_left() == pytest.approx(10 + 31)  # no epoch yet: all of them are left
    eta.leave_out(["b"])
    assert eta.count == 1


def test_jobs_begin_as_places_become_free() -> None:
    assert makespan([3, 2, 2], 1) == 7
    assert makespan([3, 2, 2], 2) == 4
    assert makespan([1, 1], 2, active=[10, 5]) == 10
    assert makespan([], 3) == 0


def test_the_time_left_in_words() -> None:
    told = {None: "not known yet", 0.0: "nothing left", 30.0: "less than a minute left",
            300.0: "about 5 min left", 9000.0: "about 2 h 30 min left"}  # fmt: skip
    for seconds, words in told.items():
        assert words in time_left_text(seconds)


def test_a_run_that_has_only_its_test_left_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    eta = Eta({"a": Parts({"train": 90.0}, {}, {"evaluate": 30.0})}, {"a": 3}, in_seconds=True)
    folder = RunFolder(tmp_path / "a")
    eta.start("a", folder)
    clock.now += OVERHEAD_S + 90
    journal(folder, 3)
    left = eta.seconds_left()
    assert left is not None
    assert 25 < left < 35
