"""The same rounds by every engine: one process, workers, Flower's simulation, Flower's deployment.

Seconds per round, and the bytes per round that pass between nodes and SuperLink, all weights
trained or a tenth of them. The deployment is real processes on loopback with TLS and node keys,
through a relay that counts. Run: python benchmarks/engines.py [KEY=VALUE ...]
"""

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from rich.table import Table

from fedlens.cli.shared import PLAIN, out
from fedlens.config.compose import compose
from fedlens.config.schema import Config
from fedlens.experiments.flower import deployment
from fedlens.experiments.local_data import deal
from fedlens.runtime.stop import Interrupted
from played import Played, counted, played
from side_by_side import print_verdict
from wiretap import Traffic, Wiretap

DENSITIES = {"all": [], "0.1": ["sparse.density=0.1", "sparse.rule=random"]}
HERE = ("serial", "parallel", "flower_simulation")  # the engines that need no federation
DEPLOYED = "flower"
SETTLING = 3.0  # seconds after a run, before what is idle is idle


@dataclass(frozen=True)
class Row:
    """What is known of one engine at one density, over all turns."""

    engine: str
    density: str
    seconds: float  # per round
    ratio: float  # over serial in the same turn
    start_up: float
    wire: Traffic | None = None  # per round
    recorded: Traffic | None = None
    once: Traffic | None = None  # in a run, besides its rounds: the nodes are told what to build


def configured(told: argparse.Namespace, root: Path, name: str, words: Sequence[str]) -> Config:
    """The quickstart's federation in which everybody takes part in every round."""
    return compose(
        "quickstart_fedavg",
        [
            *(f"federated.clients={told.clients}", "federated.participation=1.0"),
            *(f"federated.local_steps={told.steps}", f"federated.rounds={told.rounds}"),
            *("threads=1", "engine.threads_per_client=1", f"engine.deadline={told.deadline}"),
            *(f"evaluate.every={told.rounds}", "evaluate.test=false", "evaluate.select=last"),
            *("checkpoint.every=1", f"checkpoint.keep_last={told.rounds}"),
            *(f"run.root={root}", f"run.name={name}"),
            *words,
            *told.overrides,
        ],
    )


@contextmanager
def deployed(folder: Path, nodes: int) -> Iterator[Wiretap]:
    """SuperLink and nodes, who meet at the relay; all are gone afterwards."""
    taps: list[Wiretap] = []

    def through(address: str) -> str:
        taps.append(stack.enter_context(Wiretap(address)))
        return taps[0].address

    with ExitStack() as stack:
        stack.enter_context(
            deployment.local_federation(
                folder,
                nodes,
                address="127.0.0.1:0",
                insecure=False,
                say=lambda line: None,
                through=through,
            )
        )
        yield taps[0]


class Measurements:
    """Turns in which every engine plays every density once."""

    def __init__(self, told: argparse.Namespace, folder: Path) -> None:
        self.told = told
        self.folder = folder
        self.runs: dict[tuple[str, str], list[Played]] = {}
        self.traffic: dict[str, list[dict[str, Traffic]]] = {name: [] for name in DENSITIES}
        self.idle: list[tuple[float, Traffic]] = []  # seconds, and what passed in them
        self.openings: list[float] = []  # seconds until a federation was there

    def turn(self, number: int) -> None:
        for density in DENSITIES:
            for engine in HERE:
                self._play(engine, density, number, [f"engine.workers={self.told.nodes}"])
        federation = self.folder / f"federation-{number}"
        deal(configured(self.told, self.folder, "world", []), federation, self.told.nodes)
        clock = time.monotonic()
        with deployed(federation, self.told.nodes) as tap:
            self.openings.append(time.monotonic() - clock)
            for density in DENSITIES:
                run = self._play(DEPLOYED, density, number, [f"engine.federation={federation}"])
                self.traffic[density].append(counted(run, tap))
            time.sleep(SETTLING)
            began = time.time_ns()
            time.sleep(self.told.idle)
            self.idle.append((self.told.idle, tap.between(began, time.time_ns())))

    def warm_up(self) -> None:
        """What is made once and kept (weights, data) belongs to nobody's start-up."""
        words = ["engine=serial", "federated.rounds=1"]
        played(configured(self.told, self.folder, "warm-up", words))

    def _play(self, engine: str, density: str, number: int, words: Sequence[str]) -> Played:
        name = f"{engine}-{density}-{number}"
        words = [f"engine={engine}", *words, *DENSITIES[density]]
        run = played(configured(self.told, self.folder / "runs", name, words))
        self.runs.setdefault((engine, density), []).append(run)
        out.print(f"{name}: {run.seconds:.2f} s per round, {run.start_up:.1f} s besides", **PLAIN)
        return run

    def rows(self) -> Iterator[Row]:
        for (engine, density), runs in self.runs.items():
            serial = self.runs["serial", density]
            ratios = [one.seconds / base.seconds for one, base in zip(runs, serial, strict=True)]
            found = {}
            if engine == DEPLOYED:
                for what in ("wire", "recorded", "once"):
                    of_turns = [turn[what] for turn in self.traffic[density]]
                    middle = (statistics.median(t.up for t in of_turns),
                              statistics.median(t.down for t in of_turns))  # fmt: skip
                    found[what] = Traffic(*map(round, middle))
            yield Row(
                engine,
                density,
                statistics.median(run.seconds for run in runs),
                statistics.median(ratios),
                statistics.median(run.start_up for run in runs),
                **found,
            )

    def chatter(self) -> dict[str, float]:
        """Bytes per second that pass while nothing is done."""
        seconds = sum(length for length, _ in self.idle)
        return {
            "up": sum(found.up for _, found in self.idle) / seconds,
            "down": sum(found.down for _, found in self.idle) / seconds,
        }

    def identical(self) -> bool:
        """Whether at each density all engines ended with the same parameters, bit for bit."""
        ended: dict[str, set[str]] = {}
        for (_, density), runs in self.runs.items():
            ended.setdefault(density, set()).update(run.parameters for run in runs)
        return all(len(digests) == 1 for digests in ended.values())


def shown(rows: Sequence[Row]) -> Table:
    table = Table("engine", "density")
    for title in ("s/round", "over serial", "start-up s", "MB down", "recorded", "MB up",
                  "recorded"):  # fmt: skip
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            *(row.engine, row.density),
            *(f"{row.seconds:.2f}", f"{row.ratio:.2f}", f"{row.start_up:.1f}"),
            *(_mega(one.down if one else None) for one in (row.wire, row.recorded)),
            *(_mega(one.up if one else None) for one in (row.wire, row.recorded)),
        )
    return table


def _mega(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:.3f}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of quickstart_fedavg")
    parser.add_argument("--nodes", type=int, default=2, help="and as many workers and actors")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16, help="of each client in a round")
    parser.add_argument("--rounds", type=int, default=6, help="of each run; the first is apart")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--idle", type=float, default=60.0, help="seconds of listening to nothing")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds, of a round")
    parser.add_argument("--minutes", type=int, default=60, help="when to give up")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    told = parser.parse_args()
    if told.rounds < 2:
        parser.error("--rounds must be 2 or more: the first is start-up")
    return told


def main() -> None:
    told = _arguments()
    for reason in signal.SIGALRM, signal.SIGTERM:
        signal.signal(reason, give_up)
    signal.alarm(60 * told.minutes)
    folder = Path(tempfile.mkdtemp(prefix="fedlens-engines-"))
    try:
        found = Measurements(told, folder)
        found.warm_up()
        for number in range(told.turns):
            found.turn(number)
        report(told, found)
    except Interrupted:  # in the middle of a run, which hears signals itself
        sys.exit("given up")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def give_up(number: int, _: object) -> NoReturn:
    """In good order: processes and files of ours are gone afterwards."""
    sys.exit(f"given up ({signal.Signals(number).name})")


def report(told: argparse.Namespace, found: Measurements) -> None:
    rows, chatter = list(found.rows()), found.chatter()
    opening, identical = statistics.median(found.openings), found.identical()
    config = configured(told, Path(), "world", [])
    out.print(
        f"{config.backbone.name}, {told.clients} clients × {told.steps} steps × batch "
        f"{config.train.batch_size}, one thread each; {told.nodes} workers, actors, nodes; median "
        f"of {told.rounds - 1} rounds and {told.turns} turns",
        **PLAIN,
    )
    out.print(shown(rows))
    for row in rows:
        if row.once:
            out.print(
                f"density {row.density}: once a run {_mega(row.once.down)} MB down, "
                f"{_mega(row.once.up)} MB up",
                **PLAIN,
            )
    out.print(
        f"a federation is there after {opening:.1f} s; idle, all its nodes together send "
        f"{chatter['up']:.0f} bytes/s and get {chatter['down']:.0f}, part of the above\n"
        f"parameters after the last round: {'identical' if identical else 'DIFFERENT'}",
        **PLAIN,
    )
    if told.json:
        figures = {
            "work": {"overrides": told.overrides, "nodes": told.nodes, "clients": told.clients,
                     "steps": told.steps, "rounds": told.rounds, "turns": told.turns},
            "rows": [asdict(row) for row in rows],
            "federation_seconds": opening,
            "idle_bytes_per_second": chatter,
            "identical": identical,
        }  # fmt: skip
        told.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    ratios = {f"{row.engine}, density {row.density}": row.ratio for row in rows}
    for row in rows:
        if row.wire and row.recorded:
            ratios |= {
                f"bytes {way}, density {row.density}": passed / told
                for way, passed, told in (("up", row.wire.up, row.recorded.up),
                                          ("down", row.wire.down, row.recorded.down))
            }  # fmt: skip
    print_verdict("engines", ratios, {"identical": 1.0}, identical)


if __name__ == "__main__":
    main()
