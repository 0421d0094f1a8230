"""The same rounds by every engine: one process, workers, Flower's simulation, Flower's deployment.

Seconds per round, and the bytes per round between nodes and SuperLink, with all weights trained or
a tenth of them. The deployment is real processes on loopback with TLS and node keys, connected
through a relay that counts bytes. Run: python benchmarks/engines.py [KEY=VALUE ...]
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
from fedlens.experiments.preparation.local_data import write_shards
from fedlens.runtime.stop import Interrupted
from recorded_run import RecordedRun, run, traffic
from side_by_side import print_verdict
from wiretap import Traffic, Wiretap

DENSITIES = {"all": [], "0.1": ["sparse.density=0.1", "sparse.rule=random"]}
LOCAL = ("serial", "parallel", "flower_simulation")  # engines that need no federation
DEPLOYED = "flower"
SETTLE_S = 3.0  # after a run, before nodes are idle


@dataclass(frozen=True)
class Row:
    """The figures of one engine at one density, over all repeats."""

    engine: str
    density: str
    seconds: float  # per round
    ratio: float  # to serial in the same repeat
    start_up: float
    wire: Traffic | None = None  # per round
    recorded: Traffic | None = None
    set_up: Traffic | None = None  # of a run besides its rounds: nodes receive their setup


def engine_overrides(
    engine: str, options: argparse.Namespace, federation: Path | None = None
) -> list[str]:
    """The engine, and the parameters that its row reads."""
    parameters = {
        "serial": [],
        "parallel": [f"workers={options.nodes}"],
        "flower_simulation": [f"workers={options.nodes}", f"deadline={options.deadline}"],
        DEPLOYED: [f"deadline={options.deadline}", f"federation={federation}"],
    }
    common = [f"engine={engine}", "engine.threads_per_client=1"]
    return [*common, *(f"engine.{one}" for one in parameters[engine])]


def make_config(
    options: argparse.Namespace, root: Path, name: str, overrides: Sequence[str]
) -> Config:
    """The quickstart's federation, with all clients in every round."""
    return compose(
        "quickstart_fedavg",
        [
            *(f"federated.clients={options.clients}", "federated.participation=1.0"),
            *(f"federated.local_steps={options.steps}", f"federated.rounds={options.rounds}"),
            *("threads=1", f"evaluate.every={options.rounds}"),
            *("evaluate.test=false", "evaluate.select=last"),
            *("checkpoint.every=1", f"checkpoint.keep_last={options.rounds}"),
            *(f"run.root={root}", f"run.name={name}"),
            *overrides,
            *options.overrides,
        ],
    )


@contextmanager
def deployed(folder: Path, nodes: int) -> Iterator[Wiretap]:
    """SuperLink and nodes, connected through the relay; all of them end afterwards."""
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
                print_line=lambda line: None,
                through=through,
            )
        )
        yield taps[0]


class Measurements:
    """Runs of every engine at every density, several times over."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.runs: dict[tuple[str, str], list[RecordedRun]] = {}
        self.traffic: dict[str, list[dict[str, Traffic]]] = {name: [] for name in DENSITIES}
        self.idle: list[tuple[float, Traffic]] = []  # seconds, and the bytes sent in them
        self.openings: list[float] = []  # seconds until a federation was ready

    def repeat(self, number: int) -> None:
        for density in DENSITIES:
            for engine in LOCAL:
                self._run(density, number, engine)
        federation = self.folder / f"federation-{number}"
        config = make_config(self.options, self.folder, "data", [])
        write_shards(config, federation, self.options.nodes)
        clock = time.monotonic()
        with deployed(federation, self.options.nodes) as tap:
            self.openings.append(time.monotonic() - clock)
            for density in DENSITIES:
                done = self._run(density, number, DEPLOYED, federation)
                self.traffic[density].append(traffic(done, tap))
            time.sleep(SETTLE_S)
            began = time.time_ns()
            time.sleep(self.options.idle)
            self.idle.append((self.options.idle, tap.between(began, time.time_ns())))

    def warm_up(self) -> None:
        """Weights and data are made once and cached: no run's start-up includes them."""
        overrides = [*engine_overrides("serial", self.options), "federated.rounds=1"]
        run(make_config(self.options, self.folder, "warm-up", overrides))

    def _run(
        self, density: str, number: int, engine: str, federation: Path | None = None
    ) -> RecordedRun:
        name = f"{engine}-{density}-{number}"
        overrides = engine_overrides(engine, self.options, federation) + DENSITIES[density]
        done = run(make_config(self.options, self.folder / "runs", name, overrides))
        self.runs.setdefault((engine, density), []).append(done)
        out.print(f"{name}: {done.seconds:.2f} s per round, {done.start_up:.1f} s else", **PLAIN)
        return done

    def rows(self) -> Iterator[Row]:
        for (engine, density), runs in self.runs.items():
            serial = self.runs["serial", density]
            ratios = [one.seconds / base.seconds for one, base in zip(runs, serial, strict=True)]
            bytes_sent = {}
            if engine == DEPLOYED:
                for kind in ("wire", "recorded", "set_up"):
                    repeats = [repeat[kind] for repeat in self.traffic[density]]
                    middle = (statistics.median(t.up for t in repeats),
                              statistics.median(t.down for t in repeats))  # fmt: skip
                    bytes_sent[kind] = Traffic(*map(round, middle))
            yield Row(
                engine,
                density,
                statistics.median(done.seconds for done in runs),
                statistics.median(ratios),
                statistics.median(done.start_up for done in runs),
                **bytes_sent,
            )

    def idle_traffic(self) -> dict[str, float]:
        """Bytes per second while no run is under way."""
        seconds = sum(length for length, _ in self.idle)
        return {
            "up": sum(sent.up for _, sent in self.idle) / seconds,
            "down": sum(sent.down for _, sent in self.idle) / seconds,
        }

    def identical(self) -> bool:
        """Whether at each density all engines ended with the same parameters, bit for bit."""
        digests: dict[str, set[str]] = {}
        for (_, density), runs in self.runs.items():
            digests.setdefault(density, set()).update(done.parameters for done in runs)
        return all(len(different) == 1 for different in digests.values())


def table_of(rows: Sequence[Row]) -> Table:
    table = Table("engine", "density")
    for title in ("s/round", "to serial", "start-up s", "MB down", "recorded", "MB up",
                  "recorded"):  # fmt: skip
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            *(row.engine, row.density),
            *(f"{row.seconds:.2f}", f"{row.ratio:.2f}", f"{row.start_up:.1f}"),
            *(_megabytes(one.down if one else None) for one in (row.wire, row.recorded)),
            *(_megabytes(one.up if one else None) for one in (row.wire, row.recorded)),
        )
    return table


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:.3f}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of quickstart_fedavg")
    parser.add_argument("--nodes", type=int, default=2, help="and as many workers and actors")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16, help="of each client in a round")
    parser.add_argument("--rounds", type=int, default=6, help="of each run; the first is left out")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--idle", type=float, default=60.0, help="seconds to measure idle nodes")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds, of a round")
    parser.add_argument("--minutes", type=int, default=60, help="give up after so many")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be 2 or more: the first is left out")
    return options


def main() -> None:
    options = _arguments()
    for reason in signal.SIGALRM, signal.SIGTERM:
        signal.signal(reason, give_up)
    signal.alarm(60 * options.minutes)
    folder = Path(tempfile.mkdtemp(prefix="fedlens-engines-"))
    try:
        measurements = Measurements(options, folder)
        measurements.warm_up()
        for number in range(options.repeats):
            measurements.repeat(number)
        report(options, measurements)
    except Interrupted:  # during a run, which handles signals itself
        sys.exit("stopped")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def give_up(number: int, _: object) -> NoReturn:
    """By an exception, so that processes are ended and files removed."""
    sys.exit(f"stopped by {signal.Signals(number).name}")


def report(options: argparse.Namespace, measurements: Measurements) -> None:
    rows, idle = list(measurements.rows()), measurements.idle_traffic()
    opening, identical = statistics.median(measurements.openings), measurements.identical()
    config = make_config(options, Path(), "data", [])
    out.print(
        f"{config.backbone.name}, {options.clients} clients × {options.steps} steps × batch "
        f"{config.train.batch_size}, one thread each; {options.nodes} workers, actors, nodes; "
        f"median of {options.rounds - 1} rounds and {options.repeats} repeats",
        **PLAIN,
    )
    out.print(table_of(rows))
    for row in rows:
        if row.set_up:
            out.print(
                f"density {row.density}: once per run {_megabytes(row.set_up.down)} MB down, "
                f"{_megabytes(row.set_up.up)} MB up",
                **PLAIN,
            )
    out.print(
        f"a federation is ready after {opening:.1f} s; idle, all its nodes together send "
        f"{idle['up']:.0f} bytes/s and receive {idle['down']:.0f}, which the above includes\n"
        f"parameters after the last round: {'identical' if identical else 'DIFFERENT'}",
        **PLAIN,
    )
    if options.json:
        figures = {
            "work": {"overrides": options.overrides, "nodes": options.nodes,
                     "clients": options.clients, "steps": options.steps,
                     "rounds": options.rounds, "repeats": options.repeats},
            "rows": [asdict(row) for row in rows],
            "federation_seconds": opening,
            "idle_bytes_per_second": idle,
            "identical": identical,
        }  # fmt: skip
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    ratios = {f"{row.engine}, density {row.density}": row.ratio for row in rows}
    for row in rows:
        if row.wire and row.recorded:
            ratios |= {
                f"bytes {way}, density {row.density}": sent / recorded
                for way, sent, recorded in (("up", row.wire.up, row.recorded.up),
                                            ("down", row.wire.down, row.recorded.down))
            }  # fmt: skip
    print_verdict("engines", ratios, {"identical": 1.0}, identical)


if __name__ == "__main__":
    main()
