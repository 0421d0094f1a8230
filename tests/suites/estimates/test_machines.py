"""Speeds and memory: timed within a bounded time, remembered, derived, or of a known machine."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens.config.compose import changed, compose
from fedlens.config.schema import Config
from fedlens.errors import FedlensError
from fedlens.models.architectures import backbones
from fedlens.suites.estimates import machines, probe
from fedlens.suites.estimates.calculator import Calculator
from fedlens.suites.estimates.cost import VISIT_STEPS, Count
from fedlens.suites.estimates.counts import count
from fedlens.suites.estimates.machines import KNOWN, Elsewhere, ThisMachine, Wanted, known_machine
from fedlens.suites.estimates.memory import counted_tasks, peak_memory
from fedlens.suites.suite import find
from tests.integration.conftest import empty_cache

PICO = ["data=synthetic", "backbone=vit_pico", "backbone.pretrained=false"]


def pico(*words: str) -> Config:
    return compose("centralized", [*PICO, *words])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_cache(monkeypatch, tmp_path / "cache")


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Steps take a millisecond an image, and it takes a second to find out."""
    calls: list[tuple[int, str]] = []
    now = [0.0]

    def seconds_of_batches(config: Config, task: str, *, threads: int) -> tuple[float, float]:
        now[0] += 1.0
        calls.append((config.train.batch_size, task))
        return 0.0, 1e-3

    monkeypatch.setattr(probe, "seconds_of_batches", seconds_of_batches)
    monkeypatch.setattr(machines.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(machines, "load_average", lambda: 0.0)
    return calls


def wanted(*configs: Config) -> list[Wanted]:
    return [Wanted(config, "train", 10.0 - place) for place, config in enumerate(configs)]


@pytest.mark.slow
def test_a_linear_layer_has_two_flops_for_every_weight_forward_and_four_backward() -> None:
    """ViT pico's forward pass is some 17 MFLOP; training adds twice that, but for the input."""
    evaluated, trained = count(pico(), "evaluate"), count(pico(), "train")
    assert 2.6 < trained.flops / evaluated.flops < 3.0
    assert evaluated.flops > 2 * 16 * (trained.parameters - 96 * 100) / 2  # 16 tokens, most weights
    assert trained.trained == trained.parameters
    assert evaluated.features == 96


@pytest.mark.slow
def test_what_is_alive_grows_with_the_batch_and_shrinks_with_frozen_blocks() -> None:
    small, large = (count(pico(f"train.batch_size={n}"), "train").peak for n in (16, 64))
    assert 2 < large / small < 4  # gradients do not grow
    last = count(pico("train.batch_size=64", "train.trainable=last_blocks:1"), "train")
    assert last.peak < large / 2
    assert last.trained < last.parameters / 3


FROZEN = compose(
    "sparse_fedavg",
    [*PICO, "augment=none", "backbone.freeze_blocks=2", "sparse.density=null", "threads=1"],
)


@pytest.mark.slow
def test_steps_after_cached_blocks_have_the_flops_of_the_others() -> None:
    whole = changed(FROZEN, {"train.prefix_cache_gb": 0.0})
    evaluated, after = count(FROZEN, "evaluate"), count(FROZEN, "evaluate_cached")
    assert count(whole, "evaluate").flops == evaluated.flops
    first = evaluated.flops - after.flops
    trained = count(whole, "train").flops - count(FROZEN, "train").flops
    assert trained == first  # which have no gradients
    backbone: Any = backbones.create(backbones.find(FROZEN.backbone), resolution=None)
    depth = len(backbone.blocks)
    assert 0.9 < first / evaluated.flops / (2 / depth) < 1.2  # and embed the patches


@pytest.mark.slow
@pytest.mark.parametrize("task", ["train", "evaluate_cached"])
def test_steps_after_cached_blocks_can_be_timed(task: str) -> None:
    fixed, each = probe.seconds_of_batches(FROZEN, task, threads=1)
    assert fixed + each > 0


def test_an_image_of_a_cache_costs_what_evaluating_it_whole_costs_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    each = {"train": 5e-3, "evaluate": 3e-3, "evaluate_cached": 1e-3}
    asked: list[str] = []

    def seconds_of_batches(config: Config, task: str, *, threads: int) -> tuple[float, float]:
        asked.append(task)
        return 0.0, each[task]

    monkeypatch.setattr(probe, "seconds_of_batches", seconds_of_batches)
    monkeypatch.setattr(machines, "load_average", lambda: 0.0)
    machine = ThisMachine(Calculator())
    tasks = ["train", "evaluate_cached", "first_blocks"]
    machine.prepare([Wanted(FROZEN, task, 1.0) for task in tasks])
    assert sorted(asked) == sorted(each)
    assert machine(FROZEN, tasks)["first_blocks"] == pytest.approx(2e-3)


def test_a_known_machine_fills_a_cache_by_the_blocks_before_it() -> None:
    machine = Elsewhere(known_machine("cpu2"), Calculator())
    seconds = machine(FROZEN, ["evaluate", "evaluate_cached", "first_blocks"])
    assert 0 < seconds["evaluate_cached"] < seconds["evaluate"]
    assert seconds["first_blocks"] + seconds["evaluate_cached"] == pytest.approx(
        seconds["evaluate"]
    )


def test_the_kinds_with_most_work_are_timed_first_and_the_rest_derived(
    timed: list[tuple[int, str]],
) -> None:
    configs = [pico(f"train.batch_size={n}", "threads=1") for n in (16, 32, 64)]
    machine = ThisMachine(Calculator(), seconds=2.0)
    machine.prepare(wanted(*reversed(configs)))
    assert timed == [(64, "train"), (32, "train")]
    seconds = [machine(config, ["train"])["train"] for config in configs]
    assert seconds == pytest.approx([1e-3] * 3, rel=0.05)  # equal FLOPs per image
    assert "Timed on this machine: 2 kinds of step;" in machine.sentence()
    assert "1 more estimated from their FLOPs" in machine.sentence()


def test_little_work_is_not_timed_where_its_speed_follows_from_another(
    timed: list[tuple[int, str]],
) -> None:
    large, small = pico("train.batch_size=16"), pico("train.batch_size=32")
    machine = ThisMachine(Calculator())
    machine.prepare([Wanted(large, "train", 99.0), Wanted(small, "train", 1.0)])
    assert machine(small, ["train"])["train"] == pytest.approx(1e-3, rel=0.05)
    assert timed == [(16, "train")]


def test_a_small_batch_costs_as_much_as_its_fixed_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed at 64 images: 50 ms and 1 ms an image, so a batch of one takes 51 ms."""
    monkeypatch.setattr(probe, "seconds_of_batches", lambda *_, **__: (0.05, 1e-3))
    large, small = pico("train.batch_size=64"), pico("train.batch_size=1")
    machine = ThisMachine(Calculator())
    machine.prepare([Wanted(large, "train", 99.0), Wanted(small, "train", 1.0)])
    assert machine(large, ["train"])["train"] == pytest.approx(1e-3 + 0.05 / 64)
    assert machine(small, ["train"])["train"] == pytest.approx(0.051, rel=0.01)
    assert machine(small, ["visit"])["visit"] == pytest.approx(VISIT_STEPS * 0.05)
    assert len(machine.timed) == 1


def test_rough_estimates_time_one_kind_and_the_exact_ones_know_it(
    timed: list[tuple[int, str]],
) -> None:
    configs = [pico(f"train.batch_size={n}", "threads=1") for n in (16, 64)]
    machine = ThisMachine(Calculator())
    rough = machine.without_timing()
    rough.prepare(wanted(*configs))
    assert timed == [(16, "train")]
    rough(configs[1], ["train"])
    assert timed == [(16, "train")]
    machine.prepare(wanted(*configs))
    assert timed == [(16, "train"), (64, "train")]
    machine(configs[1], ["train"])
    assert not machine.derived
    assert set(rough.timed) == set(machine.timed)


def test_sums_are_timed_once_and_grow_with_the_square_of_the_features(
    timed: list[tuple[int, str]],
) -> None:
    """A millisecond an image at 2304 features; 96 and, of ViT-Ti/16, 192 and 26 · 192 here."""
    words = ["backbone=vit_tiny", "backbone.pretrained=false", "backbone.resolution=64"]
    deep = [*words, "head=deep_ridge", "head.layers=12"]
    configs = [compose("federated_ridge", told) for told in (PICO, words, deep)]
    machine = ThisMachine(Calculator(), seconds=0.0)
    sums = [Wanted(config, task, 1.0) for config in configs for task in ("sums", "solve")]
    machine.prepare([*wanted(pico()), *sums])
    widths = [machine.counts.features(config) for config in configs]
    assert widths == [96, 192, 4992]
    for config, width in zip(configs, widths, strict=True):
        each = 1e-3 * (width / 2304) ** 2
        found = machine(config, ["sums", "solve"])
        assert found["sums"] == pytest.approx(each)
        assert found["solve"] == pytest.approx(9 * 1.5 * (width / 6 + 100) * each)
    assert [task for _, task in timed] == ["train", "sums"]
    assert ThisMachine(Calculator()).knows(sums)


def test_no_other_speed_follows_from_that_of_sums(timed: list[tuple[int, str]]) -> None:
    config = compose("federated_ridge", PICO)
    machine = ThisMachine(Calculator(), seconds=0.0)
    machine.prepare([Wanted(config, "sums", 9.0), Wanted(config, "evaluate", 1.0)])
    assert [task for _, task in timed] == ["sums", "evaluate"]


def test_sums_are_on_the_cpu_whatever_the_model_is_on(
    timed: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ThisMachine, "_device", lambda *_: "NVIDIA T4")
    config = compose("federated_ridge", [*PICO, "threads=3"])
    machine = ThisMachine(Calculator())
    machine(config, ["sums", "evaluate"])
    machine(changed(config, {"threads": 1}), ["sums"])  # nothing is derived
    assert not machine.derived
    assert sorted(place for place, _ in machine.timed) == [
        "NVIDIA T4, 3 threads", "cpu, 1 threads", "cpu, 3 threads",
    ]  # fmt: skip


def test_what_a_client_adds_besides_its_images_counts_once_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second of 2304 features for each of 100 clients with 180 images, and nothing for images."""
    monkeypatch.setattr(probe, "seconds_of_batches", lambda *_, **__: (1.0, 1e-9))
    config = compose("federated_ridge", PICO)
    machine = ThisMachine(Calculator())
    assert 18_000 * machine(config, ["sums"])["sums"] == pytest.approx(100 * (96 / 2304) ** 2, 1e-3)


@pytest.mark.slow
def test_sums_take_longer_with_every_image() -> None:
    fixed, each = probe.seconds_of_batches(pico(), "sums", threads=1)
    assert 0 <= fixed < 10
    assert 0 < each < 1


def test_a_process_is_measured_before_it_times_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Calculator):
        separate = True
        calls: list[str] = []  # noqa: RUF012

        def call(self, module: str, function: str, *_: Any, **__: Any) -> Any:
            self.calls.append(function)
            return (0.0, 1e-3) if function == "seconds_of_batches" else 1

    monkeypatch.setattr(machines.sys, "platform", "linux")
    ThisMachine(Other()).prepare(wanted(pico("threads=1")))
    assert Other.calls.index("process_bytes") < Other.calls.index("seconds_of_batches")


@pytest.mark.parametrize(("fixed", "each", "batch_size"), [(0.004, 0.0005, 64), (0.02, 0.001, 1)])
def test_the_fixed_part_and_an_image_are_found_from_batches(
    fixed: float, each: float, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def step(index: torch.Tensor) -> None:
        now[0] += fixed + each * len(index)

    monkeypatch.setattr(probe.time, "perf_counter", lambda: now[0])
    assert probe._timed(step, batch_size) == pytest.approx((fixed, each))


def test_the_first_step_of_a_machine_just_started_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It took 4 s, when a step takes 10 ms and the libraries had to be read from disk."""
    now, seconds = [0.0], [4.0]

    def step(index: torch.Tensor) -> None:
        now[0] += seconds.pop() if seconds else 0.004 + 0.001 * len(index)

    monkeypatch.setattr(probe.time, "perf_counter", lambda: now[0])
    assert probe._timed(step, 64) == pytest.approx((0.004, 0.001))


def test_what_was_timed_is_remembered_unless_the_file_is_damaged(
    timed: list[tuple[int, str]], tmp_path: Path
) -> None:
    work = wanted(pico())
    for _ in range(2):
        ThisMachine(Calculator()).prepare(work)
    assert len(timed) == 1
    assert ThisMachine(Calculator()).knows(work)
    assert not ThisMachine(Calculator()).knows(wanted(pico("backbone=vit_tiny")))
    (path,) = (tmp_path / "cache" / "estimates").iterdir()
    for damage in ("", "{", "[1]", '{"seconds": {"a": {"each": -1}}}', '{"counts": {"a": 3}}'):
        path.write_text(damage)
        machine = ThisMachine(Calculator())
        assert not machine.knows(work)
        machine.prepare(work)
        assert json.loads(path.read_text())["seconds"]
    assert len(timed) == 6


def test_a_timing_of_a_busy_machine_is_repeated_when_it_is_idle(
    timed: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = wanted(pico("threads=1"))
    for load, times in ((99.0, 1), (99.0, 1), (0.0, 2), (99.0, 2)):
        monkeypatch.setattr(machines, "load_average", lambda load=load: load)
        machine = ThisMachine(Calculator())
        machine.prepare(work)
        assert len(timed) == times
        assert ("busy" in machine.sentence()) == (load > 9)


def test_a_timing_of_a_busy_machine_is_used_where_there_is_no_time_for_another(
    timed: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = wanted(pico())
    monkeypatch.setattr(machines, "load_average", lambda: 99.0)
    ThisMachine(Calculator()).prepare(work)
    monkeypatch.setattr(machines, "load_average", lambda: 0.0)
    machine = ThisMachine(Calculator(), seconds=0.0)
    assert machine.knows(work)
    machine.prepare(work)
    assert len(timed) == 1


def test_a_known_machine_divides_flops_by_its_rate() -> None:
    config = pico()
    machine = Elsewhere(known_machine("t4"), Calculator())
    machine.prepare(wanted(config))
    flops = count(config, "train").flops
    row = KNOWN["t4"]
    least = flops / (row.single * row.utilisation)
    assert machine(config, ["train"])["train"] >= least
    half = changed(config, {"train.precision": "amp"})
    assert machine(half, ["train"])["train"] < machine(config, ["train"])["train"]
    assert "8.1 TFLOP/s peak in float32, 40% assumed" in machine.sentence()
    assert machine.sentence().startswith("Computed for NVIDIA T4")
    with pytest.raises(FedlensError, match="not a known machine"):
        known_machine("t5")


def test_a_known_machine_solves_heads_on_its_cpu() -> None:
    """2 · 96² FLOP at 0.4 of the 150 GFLOP/s of two cores; six passes over 96² numbers a client."""
    config = compose("federated_ridge", PICO)
    each = 2 * 96**2 / (0.4 * 150e9)
    fixed = 6 * 8 * 96**2 / 20e9
    found = {}
    for name in ("t4", "cpu2", "cpu8"):
        machine = Elsewhere(known_machine(name), Calculator())
        machine.prepare([Wanted(config, "sums", 1.0), Wanted(config, "solve", 1.0)])
        assert ("assumed to be 2 CPU cores" in machine.sentence()) == (name == "t4")
        found[name] = machine(config, ["sums", "solve"])
    assert found["t4"] == found["cpu2"]
    assert found["t4"]["sums"] == pytest.approx(each + fixed / 180)
    assert found["t4"]["solve"] == pytest.approx(9 * 1.5 * (96 / 6 + 100) * each + 19 * fixed)
    assert found["cpu8"]["sums"] < found["cpu2"]["sums"]


def test_sums_need_no_count_of_their_own() -> None:
    tasks = counted_tasks(compose("federated_ridge", PICO))
    assert tasks == ["evaluate"]


def test_peak_memory_by_hand() -> None:
    """1000 weights, 100 images of 3 kB: 4 bytes each, with momentum; 500 MB alive in a step.

    While images are read there are three copies of all 20,000.
    """
    config = pico("data.train_per_class=1", "head=linear")
    model = Count(flops=1, peak=2_000, parameters=1000, trained=1000, masked=0, features=10)
    counts = {"evaluate": model, "train": Count(1, 500_000_000, 1000, 1000, 0, 10)}
    expected = 10**6 + 1.1 * (100 * 3072 + 4_000 + 4_000 + 500_000_000)
    assert peak_memory(config, counts, 10**6) == pytest.approx(expected)
    small = {**counts, "train": model}
    assert peak_memory(config, small, 10**6) == pytest.approx(10**6 + 1.1 * 3 * 20_000 * 3072)
    federated = compose("quickstart_fedavg", ["data.train_per_class=1"])
    more = peak_memory(federated, counts, 10**6) - peak_memory(config, counts, 10**6)
    assert more == pytest.approx(1.1 * 1000 * (4 * 4 + 8))  # model, update, two sums; one double


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_run_takes_the_memory_that_was_predicted(tmp_path: Path) -> None:
    words = [*PICO, "train.epochs=1", "train.steps_per_epoch=2", "data.train_per_class=10",
             "data.test_per_class=2",
             "device=cpu", "threads=1", f"run.root={tmp_path}"]  # fmt: skip
    script = f"""
from pathlib import Path
from fedlens.experiments.run import start
from fedlens.config.compose import compose
from fedlens.suites.estimates import counts, memory, probe
process = probe.process_bytes()
config = compose("centralized", {words!r})
found = {{task: counts.count(config, task) for task in memory.counted_tasks(config)}}
predicted = memory.peak_memory(config, found, process)
start(config)
status = Path("/proc/self/status").read_text()  # getrusage may count the parent's memory
print(predicted, 1024 * int(status.split("VmHWM:")[1].split()[0]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    predicted, measured = map(int, done.stdout.split()[-2:])
    assert predicted == pytest.approx(measured, rel=0.25)


@pytest.mark.slow
def test_cells_of_a_suite_are_composed_as_by_hydra() -> None:
    cells = find("full").cells([], seeds=1)
    for cell in cells[:: len(cells) // 5]:
        experiment, *overrides = cell.arguments
        assert repr(compose(experiment, overrides)) == repr(cell.config)


@pytest.mark.slow
def test_another_process_calculates_where_torch_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It answers, hands errors on, and its end is told."""
    monkeypatch.delitem(sys.modules, "torch")
    with Calculator() as calculator:
        calculator.start()
        assert calculator.separate
        config = pico()
        found: Any = calculator.call("counts", "count", config, "evaluate")
        assert found.features == 96
        impossible = changed(config, {"backbone.resolution": 33})
        with pytest.raises(FedlensError, match="multiple"):
            calculator.call("counts", "count", impossible, "evaluate")
        calculator._process.kill()  # type: ignore[union-attr]
        with pytest.raises(FedlensError, match="has ended"):
            calculator.call("counts", "count", config, "train")
