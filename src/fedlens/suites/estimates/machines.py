"""How long an image takes on a machine, and how much memory a run: on this one, or on a known one.

Here a step of each kind is timed, the kinds with most work first, until the time for it is over;
the others follow by arithmetic: a batch takes a fixed time, and its images seconds ∝ FLOPs.
Elsewhere, seconds = FLOPs / (peak × utilisation).
"""

import hashlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedlens.config.schema import Config
from fedlens.errors import FedlensError, suggest
from fedlens.files import cache_dir, write_json
from fedlens.runtime import units
from fedlens.runtime.machine import cores_allowed, load_average, processor
from fedlens.suites.estimates.calculator import Calculator
from fedlens.suites.estimates.cost import (
    CLOSED_FORM,
    EVALUATIONS,
    HEAD_S,
    RELATIVE_COST,
    SUMS_WIDTH,
    VISIT_STEPS,
    Count,
    batch_of,
    count_key,
    dataset_sizes,
    factorisations,
    speed_key,
)
from fedlens.suites.estimates.memory import counted_tasks, peak_memory

log = logging.getLogger(__name__)

TIMING_S = 6.0  # for all kinds of steps together
PATIENCE_S = 12.0  # after which nothing more is timed, since the command began
LONGER_PATIENCE_S = 30.0  # where the runs follow
PROCESS = 700_000_000  # bytes of a process that has loaded torch, where it cannot be measured
LARGE_SHARE = 0.1  # of the work: a kind is timed although its speed follows from another's
CUDA_CONTEXT = 600_000_000  # bytes of a GPU's memory that CUDA and its libraries take
UPDATE_PASSES = 5  # over the weights, of a training step: its gradient, momentum and update
SUMS_RATE = 0.4  # of a CPU's peak in float32, by XᵀX in float64: 80 % of half of it
SUMS_PASSES = 6  # over XᵀX, of a client's sums, to make it and to add it to the others'
CHOLESKY = 1.5  # times as long as sums of equal FLOPs
MATRICES = 10  # of the size of XᵀX, made for a head besides one for each factorisation
FORMAT = 5  # of the cache's file: another number makes a new one


class Wanted(NamedTuple):
    """A task of a run, and a rough measure of how much of it there is."""

    config: Config
    task: str
    share: float


class Timed(NamedTuple):
    """A kind of step: a batch of n images takes `fixed` + `each` · n seconds."""

    config: Config
    task: str
    fixed: float
    each: float


class Machine(Protocol):
    """What estimates need to know of a machine; calling it gives task → seconds per image."""

    memory: int | None  # bytes of main memory, or of the GPU's; None: not known

    def __call__(self, config: Config, tasks: Collection[str]) -> Mapping[str, float]: ...

    def prepare(self, wanted: Sequence[Wanted]) -> None:
        """Receives all work before the first estimate, and times the largest part of it first."""
        ...

    def without_timing(self) -> "Machine":
        """The same, for rough estimates: what was not timed so far is derived."""
        ...

    def peak_memory(self, config: Config) -> int: ...

    def sentence(self) -> str:
        """How its figures were obtained."""
        ...


@dataclass(frozen=True)
class KnownMachine:
    """Peak rates as its maker states them, and the share of them that training reaches."""

    name: str
    label: str
    single: float  # FLOP/s in float32
    half: float  # FLOP/s in half precision, where it has it; else as in float32
    half_name: str
    bandwidth: float  # bytes/s of its memory
    memory: int  # bytes
    utilisation: float  # of the peak in float32
    half_utilisation: float
    gpu: bool
    cpu: str  # the row of the CPU that adds up features and solves heads
    measured: str = ""  # where the utilisation comes from; "": it is assumed


KNOWN = {
    one.name: one
    for one in (
        KnownMachine("t4", "NVIDIA T4", 8.1e12, 65e12, "float16", 320e9, 16 * 10**9, 0.4, 0.15,
                     gpu=True, cpu="cpu2"),
        KnownMachine("a100", "NVIDIA A100 40 GB", 19.5e12, 312e12, "bfloat16", 1555e9, 40 * 10**9,
                     0.5, 0.2, gpu=True, cpu="cpu8"),
        KnownMachine("cpu2", "2 CPU cores with AVX2", 150e9, 150e9, "bfloat16", 20e9, 8 * 10**9,
                     0.35, 0.35, gpu=False, cpu="cpu2"),
        KnownMachine("cpu8", "8 CPU cores with AVX2", 600e9, 600e9, "bfloat16", 40e9, 32 * 10**9,
                     0.3, 0.3, gpu=False, cpu="cpu8"),
    )
}  # fmt: skip


def known_machine(name: str) -> KnownMachine:
    if name not in KNOWN:
        raise FedlensError(f"--on {name} is not a known machine: {suggest(name, KNOWN)}")
    return KNOWN[name]


class _Counts:
    """Counts of tasks, and the memory that follows from them; kept on disk."""

    def __init__(self, calculator: Calculator) -> None:
        self.calculator = calculator
        self.kept = _Kept()

    def count(self, config: Config, task: str) -> Count:
        key = count_key(config, task)
        if (stored := self.kept.read("counts", key)) is not None:
            return Count(**stored)
        counted: Count = self.calculator.call("counts", "count", config, task)
        self.kept.write("counts", key, asdict(counted))
        return counted

    def features(self, config: Config) -> int:
        """How many the head reads."""
        return self.count(config, "evaluate").features

    def peak_memory(self, config: Config, *, gpu: bool) -> int:
        counts = {task: self.count(config, task) for task in counted_tasks(config)}
        if gpu:
            return peak_memory(config, counts, CUDA_CONTEXT, on_device=True)
        return peak_memory(config, counts, self.process())

    def process(self) -> int:
        """Bytes of one that has loaded torch: to be asked before any step is timed."""
        stored = self.kept.read("process", "bytes")
        if stored is None:
            stored = PROCESS
            if self.calculator.separate and sys.platform == "linux":
                stored = self.calculator.call("probe", "process_bytes")
                self.kept.write("process", "bytes", stored)
        return int(stored)


class Elsewhere:
    """A machine of the table: nothing is timed."""

    def __init__(self, row: KnownMachine, calculator: Calculator) -> None:
        self.row = row
        self.memory: int | None = row.memory
        self.counts = _Counts(calculator)
        self._largest: tuple[float, Config] | None = None
        self._solves = False

    def prepare(self, wanted: Sequence[Wanted]) -> None:
        self._solves = self._solves or any(one.task in CLOSED_FORM for one in wanted)
        if wanted:
            first = max(wanted, key=lambda one: one.share)
            self._largest = (first.share, first.config)

    def without_timing(self) -> "Elsewhere":
        return self

    def __call__(self, config: Config, tasks: Collection[str]) -> dict[str, float]:
        return {task: self._seconds(config, task) for task in tasks}

    def _seconds(self, config: Config, task: str) -> float:
        """The slower of arithmetic and memory; memory moves what a step has alive several times."""
        if task == "head":
            return HEAD_S
        row = self.row
        if task in CLOSED_FORM:
            cpu, features = KNOWN[row.cpu], self.counts.features(config)
            each = 2 * features**2 / (SUMS_RATE * cpu.single)
            fixed = SUMS_PASSES * 8 * features**2 / cpu.bandwidth
            return _closed_form_seconds(config, task, features, fixed, each)
        if task == "first_blocks":
            return _first_blocks(self, config)
        if task == "visit":
            model = 4 * self.counts.count(config, "train").parameters
            return VISIT_STEPS * UPDATE_PASSES * model / row.bandwidth
        counted = self.counts.count(config, task)
        half = config.train.precision == "amp"
        rate = row.half * row.half_utilisation if half else row.single * row.utilisation
        images = batch_of(config, task)
        passes = 1.0 if task in EVALUATIONS else 3.0
        moved = passes * counted.peak / images * (0.5 if half else 1.0)
        weights = 4 * counted.parameters * (3 if task == "calibrate" else UPDATE_PASSES / images)
        return max(counted.flops / rate, (moved + weights) / row.bandwidth)

    def peak_memory(self, config: Config) -> int:
        return self.counts.peak_memory(config, gpu=self.row.gpu)

    def sentence(self) -> str:
        row = self.row
        config = self._largest[1] if self._largest else None
        half = config is not None and config.train.precision == "amp"
        rate, precision, share = (
            (row.half, row.half_name, row.half_utilisation)
            if half
            else (row.single, "float32", row.utilisation)
        )
        counted = ""
        if config is not None:
            flops = self.counts.count(config, "evaluate").flops
            counted = f"{flops / 1e9:.3g} GFLOP per image forward, "
        origin = f"measured on {row.measured}" if row.measured else "assumed"
        on_cpu = (
            f" Closed-form heads are solved on its CPU, assumed to be {KNOWN[row.cpu].label}."
            if row.gpu and self._solves
            else ""
        )
        return (
            f"{'Computed' if not row.measured else 'Computed from a measured rate'} for {row.label}"
            f": {counted}{_rate_text(rate)} peak in {precision}, {share:.0%} {origin}; "
            f"{units.size_text(row.bandwidth)}/s and {units.size_text(row.memory)} of memory."
            f"{on_cpu}"
        )


class ThisMachine:
    """Steps are timed here, in a bounded time, and remembered for the next command."""

    def __init__(
        self,
        calculator: Calculator,
        *,
        at_once: int = 1,
        seconds: float = TIMING_S,
        began: float | None = None,
        patience: float = PATIENCE_S,
    ) -> None:
        """`at_once` runs share the cores.

        `seconds` are for timing; less remains where `began`, by the monotonic clock, is long ago.
        """
        self.counts = _Counts(calculator)
        self.kept = self.counts.kept
        self.at_once = at_once
        self.memory: int | None = _memory()
        self.busy = load_average() > cores_allowed()
        self.timed: dict[tuple[str, str], Timed] = {}
        self.remembered: set[tuple[str, str]] = set()
        self.derived: dict[tuple[str, str], Timed] = {}
        self._seconds_left = seconds
        self._deadline = (time.monotonic() if began is None else began) + patience

    @property
    def threads(self) -> int:
        """Of one run."""
        key = f"{cores_allowed()} {os.environ.get('OMP_NUM_THREADS', '')}"
        stored = self.kept.read("threads", key)
        if stored is None:
            stored = self.counts.calculator.call("probe", "available")
            self.kept.write("threads", key, stored)
        return max(1, int(stored) // self.at_once)

    def knows(self, wanted: Sequence[Wanted]) -> bool:
        """Whether all of it was timed before, or follows from that without loading torch."""
        if "threads" not in self.kept.content:
            return False
        kinds = {self._key(one.config, one.task): one for one in map(_timed_as, wanted) if one}
        missing = [one for key, one in kinds.items() if not self._recall(key, one)]
        counted = [(one.config, one.task) for one in self._steps()] if missing else []
        counted += [(one.config, one.task) for one in missing]
        counted += [(one.config, "evaluate") for one in wanted if one.task in CLOSED_FORM]
        return all(self._derives(one.config, one.task) for one in missing) and all(
            self.kept.read("counts", count_key(config, task)) is not None
            for config, task in counted
        )

    def prepare(self, wanted: Sequence[Wanted]) -> None:
        kinds: dict[tuple[str, str], Wanted] = {}
        for one in filter(None, map(_timed_as, wanted)):
            key = self._key(one.config, one.task)
            before = kinds.get(key)
            kinds[key] = one._replace(share=one.share + (before.share if before else 0.0))
        ordered = sorted(kinds.items(), key=lambda item: -item[1].share)
        missing = [(key, one) for key, one in ordered if not self._recall(key, one)]
        total = sum(one.share for _, one in ordered)
        for key, one in missing:
            matters = one.share > LARGE_SHARE * total and not self.busy
            if self._may_time(one.task) and (matters or not self._derives(one.config, one.task)):
                self._time(key, one.config, one.task)
        self.kept.save()

    def without_timing(self) -> "ThisMachine":
        """What either of the two times, both know; the first kind is timed in any case."""
        rough = copy(self)
        rough.derived, rough._seconds_left = {}, 0.0
        return rough

    def __call__(self, config: Config, tasks: Collection[str]) -> dict[str, float]:
        return {task: self._seconds(config, task) for task in tasks}

    def _seconds(self, config: Config, task: str) -> float:
        if task == "head":
            return HEAD_S
        if task == "first_blocks":
            return _first_blocks(self, config)
        if task == "visit":
            return VISIT_STEPS * self._kind(config, "train").fixed
        if task in CLOSED_FORM:
            kind, features = self._kind(config, "sums"), self.counts.features(config)
            self.kept.save()
            scale = (features / SUMS_WIDTH) ** 2
            return _closed_form_seconds(
                config, task, features, scale * kind.fixed, scale * kind.each
            )
        kind = self._kind(config, task)
        return kind.each + kind.fixed / batch_of(config, task)

    def _kind(self, config: Config, task: str) -> Timed:
        key = self._key(config, task)
        if key in self.derived:
            return self.derived[key]
        if key not in self.timed and not self._recall(key, Wanted(config, task, 0.0)):
            if self._derives(config, task) or not self._may_time(task):
                self.derived[key] = self._derive(config, task)
                self.kept.save()
                return self.derived[key]
            self._time(key, config, task)
            self.kept.save()
        return self.timed[key]

    def peak_memory(self, config: Config) -> int:
        found = self.counts.peak_memory(config, gpu=self._device(config) not in ("cpu", "mps"))
        self.kept.save()
        return found

    def sentence(self) -> str:
        new, before = len(self.timed) - len(self.remembered), len(self.remembered)
        earlier = f" ({before} of them earlier)" if new and before else " (earlier)" * (before > 0)
        text = f"Timed on this machine{earlier}: {units.counted(len(self.timed), 'kind')} of step"
        if self.derived:
            text += f"; {len(self.derived)} more estimated from their FLOPs"
        if self.busy:
            text += (
                f". The machine is busy (load {load_average():.1f} on {cores_allowed()} cores): "
                "without that, runs are faster"
            )
        return f"{text}."

    def _key(self, config: Config, task: str) -> tuple[str, str]:
        """Of sums, those of one width tell all others."""
        threads = config.threads or self.threads
        if task == "sums":
            return f"cpu, {threads} threads", f"sums of {SUMS_WIDTH} features"
        return f"{self._device(config)}, {threads} threads", speed_key(config, task)

    def _device(self, config: Config) -> str:
        """Without a driver of a GPU it is the CPU; else torch knows."""
        accelerated = Path("/dev/nvidiactl").exists() or sys.platform in ("darwin", "win32")
        if config.device == "cpu" or (config.device == "auto" and not accelerated):
            return "cpu"
        stored = self.kept.read("devices", config.device)
        if stored is None:
            stored = self.counts.calculator.call("probe", "device_name", config)
            self.kept.write("devices", config.device, stored)
        return str(stored)

    def _recall(self, key: tuple[str, str], one: Wanted) -> bool:
        """What was timed on a busy machine is timed again once it is not, if there is time."""
        if key in self.timed:
            return True
        stored = self.kept.read("seconds", " ".join(key))
        again = self._seconds_left > 0 and not self.busy
        if stored is None or (stored["busy"] and again):
            return False
        self.timed[key] = Timed(one.config, one.task, float(stored["fixed"]), float(stored["each"]))
        self.remembered.add(key)
        return True

    def _may_time(self, task: str) -> bool:
        """At least one kind is timed, whatever it takes: the others are derived from it.

        So are sums, which take a second and follow from nothing else.
        """
        if task == "sums" or not self._steps():
            return True
        return self._seconds_left > 0 and time.monotonic() < self._deadline

    def _steps(self) -> list[Timed]:
        """The kinds that were timed, of steps of a model."""
        return [one for one in self.timed.values() if one.task != "sums"]

    def _time(self, key: tuple[str, str], config: Config, task: str) -> None:
        self.counts.calculator.call("probe", "available")  # the process has loaded torch then
        self.counts.process()
        log.info("timing %s", _name(config, task))
        started = time.monotonic()
        threads = config.threads or self.threads
        fixed, each = self.counts.calculator.call(
            "probe", "seconds_of_batches", config, task, threads=threads
        )
        self._seconds_left -= time.monotonic() - started
        self.timed[key] = Timed(config, task, fixed, each)
        stored = {"fixed": fixed, "each": each, "busy": self.busy}
        self.kept.write("seconds", " ".join(key), stored)

    def _derives(self, config: Config, task: str) -> bool:
        """Whether the speed follows from that of the same task and backbone, timed before.

        On a busy machine, where loading torch takes long, any task timed by an earlier command is
        enough.
        """
        any_task = self.busy and bool(self.remembered)
        return task != "sums" and any(
            one.config.backbone.name == config.backbone.name and (any_task or one.task == task)
            for one in self._steps()
        )

    def _derive(self, config: Config, task: str) -> Timed:
        """From the nearest kind that was timed: by task, then by backbone, then by FLOPs.

        What an image takes follows from the FLOPs; the fixed time from the size of the model, and
        from how many passes the task has.
        """
        counted = self.counts.count(config, task)

        def distance(one: Timed) -> tuple[bool, bool, float]:
            ratio = counted.flops / self.counts.count(one.config, one.task).flops
            return (
                one.task != task,
                one.config.backbone.name != config.backbone.name,
                abs(math.log(ratio)),
            )

        nearest = min(self._steps(), key=distance)
        other = self.counts.count(nearest.config, nearest.task)
        passes = RELATIVE_COST[task] / RELATIVE_COST[nearest.task]
        fixed = nearest.fixed * passes * counted.parameters / other.parameters
        return Timed(config, task, fixed, nearest.each * counted.flops / other.flops)


def remembers_speeds() -> bool:
    """Whether steps were timed on this machine before."""
    return bool(_Kept().content.get("seconds"))


class _Kept:
    """Facts of this machine in a file of the cache; a damaged file is as good as none."""

    def __init__(self) -> None:
        self.machine = {
            "processor": processor(),
            "cores": cores_allowed(),
            "torch": version("torch"),
            "format": FORMAT,
        }
        digest = hashlib.sha256(json.dumps(self.machine, sort_keys=True).encode()).hexdigest()
        self.path = cache_dir() / "estimates" / f"{digest[:16]}.json"
        self.content = self._load()
        self.changed = False

    def read(self, kind: str, key: str) -> Any:
        return self.content.get(kind, {}).get(key)

    def write(self, kind: str, key: str, value: Any) -> None:
        self.content.setdefault(kind, {})[key] = value
        self.changed = True

    def save(self) -> None:
        """With what other processes have written in the meantime."""
        if not self.changed:
            return
        for kind, values in self._load().items():
            self.content[kind] = {**values, **self.content.get(kind, {})}
        try:
            write_json(self.path, {"machine": self.machine, **self.content})
        except FedlensError as error:
            log.warning("The timings could not be saved: %s", error)
        self.changed = False

    def _load(self) -> dict[str, dict[str, Any]]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            _check(content)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}
        return {kind: values for kind, values in content.items() if kind != "machine"}


def _check(content: Any) -> None:
    """Raises where the content cannot be used."""
    for values in content.values():
        values.items()
    for stored in content.get("seconds", {}).values():
        if not (
            0 < stored["each"] < math.inf and 0 <= stored["fixed"] < math.inf and "busy" in stored
        ):
            raise ValueError
    for stored in content.get("counts", {}).values():
        if not stored["flops"] >= 0 or len(stored) != 6:
            raise ValueError


def _timed_as(one: Wanted) -> Wanted | None:
    """The step to time for it: a visit costs a part of a training step, a head nothing.

    A head in closed form costs as much as sums of so many images, and the first blocks what the
    others leave of an evaluation.
    """
    if one.task == "head":
        return None
    instead = {"visit": "train", "solve": "sums", "first_blocks": "evaluate"}
    return one._replace(task=instead.get(one.task, one.task))


def _first_blocks(machine: Machine, config: Config) -> float:
    """Seconds of an image in the blocks before those that `evaluate_cached` computes."""
    seconds = machine(config, ["evaluate", "evaluate_cached"])
    return max(0.0, seconds["evaluate"] - seconds["evaluate_cached"])


def _closed_form_seconds(
    config: Config, task: str, features: int, fixed: float, each: float
) -> float:
    """Of an image in the sums, or of a head, where the sums of n images take `fixed` + `each` · n.

    An image has 2·D² FLOP, a factorisation D³/3, and a solution from it 2·D² for every class.
    """
    if task == "sums":
        return each + fixed / batch_of(config, task)
    tried, classes = factorisations(config), dataset_sizes(config.data)["classes"]
    images = tried * CHOLESKY * (features / 6 + classes)
    return images * each + (MATRICES + tried) * fixed


def _name(config: Config, task: str) -> str:
    if task == "sums":
        return "sums of features"
    verb = {
        "train": "training",
        "evaluate": "evaluation",
        "evaluate_cached": "evaluation from cached activations",
        "calibrate": "calibration",
    }
    resolution = config.backbone.resolution
    at = f" at {resolution} px" if resolution else ""
    return f"{verb[task]} of {config.backbone.name}{at}"


def _rate_text(rate: float) -> str:
    return f"{rate / 1e12:g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:g} GFLOP/s"


def _memory() -> int | None:
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
