"""Runs with rows of a plugin: resumed, in workers, as jobs, in searches, and over Flower."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedlens import plugins
from fedlens.config.compose import compose
from fedlens.config.schema import Config
from fedlens.errors import FedlensError
from fedlens.experiments.run import start
from fedlens.registry import REGISTRIES, engine, load_plugin
from fedlens.store.run_folder import RunFolder, runs
from tests.config.test_plugins import forget, write
from tests.integration.conftest import FEDERATED, ON_FEATURES, TINY, Call, facts, interrupted_at

PLUGIN = """
from dataclasses import dataclass

import fedlens as fl


@fl.aggregator(label="damped mean")
def damped(updates, weights, *, factor: float = 0.5):
    total = sum(weights)
    return {n: sum(factor * w / total * u[n] for w, u in zip(weights, updates)) for n in updates[0]}


def plain(updates, weights, *, factor: float = 0.5):
    return damped(updates, weights, factor=factor)


@fl.client_optimizer(label="my SGD")
@dataclass(frozen=True, kw_only=True)
class MySgd:
    momentum: float = 0.5

    def make(self, named, masks, *, lr):
        named = [(name, value) for name, value in named if value.requires_grad]
        return fl.SparseSGDM(named, lr=lr, momentum=self.momentum, masks=masks or {})
"""
SMALL = [*TINY, *FEDERATED, *ON_FEATURES, "federated.rounds=2", "checkpoint.every=1"]
MINE = ["algorithm.aggregator=damped", "train.optimizer=my_sgd"]


@pytest.fixture
def plugin(no_plugins: Path) -> Path:
    """A plugin in the current folder, which nothing has loaded yet."""
    return write(no_plugins, PLUGIN)


def only_run(root: str = "runs") -> RunFolder:
    (folder,) = runs(Path(root))
    return folder


# --- a run ---------------------------------------------------------------------------------------


def test_a_run_records_its_plugin_and_a_report_needs_none(
    plugin: Path, fedlens: Call, tmp_path: Path, unsaved_figures: None
) -> None:
    code, _, err = fedlens("run", "quickstart_fedavg", *SMALL, *MINE, "--plugin", "mine.py")
    assert code == 0, err
    folder = only_run()
    sha256 = plugins._files["mine"].sha256
    used = (folder.manifest or {})["plugins"]
    record = {"file": "mine.py", "sha256": sha256}
    assert used == {"train.optimizer": record, "algorithm.aggregator": record}
    copy = folder.path / "plugins" / sha256[:8] / "mine.py"
    assert copy.read_text() == PLUGIN
    assert folder.read_config()["algorithm"]["aggregator"]["plugin"] == f"mine.py:{sha256}"
    plugin.write_text("raise SystemError('a report runs no plugin')\n")
    copy.write_text("raise SystemError('a report runs no plugin')\n")
    forget()
    printed = ""
    for words in (["ls"], ["report", "runs", "--out", "report"], ["show", "damped"]):
        code, printed, err = fedlens(*words)
        assert code == 0, err
        assert "mine" not in sys.modules
    assert "damped mean" in printed
    content = json.loads((tmp_path / "report" / "content.json").read_text(encoding="utf-8"))
    assert not [check for check in content["audit"] if check["violations"]]


def test_a_run_is_resumed_with_its_copy_and_refused_with_a_changed_plugin(
    plugin: Path, fedlens: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_plugin(plugin)
    config = compose("quickstart_fedavg", [*SMALL, *MINE])
    assert interrupted_at(config, 6, monkeypatch)
    folder = only_run()
    forget()
    plugin.write_text(PLUGIN.replace("factor: float = 0.5", "factor: float = 0.6"))
    code, _, err = fedlens("resume", folder.name, "--plugin", "mine.py")
    assert code == 2
    assert "comes from the plugin mine.py" in err
    assert "load the same file again" in err
    forget()
    plugin.unlink()
    code, _, err = fedlens("resume", folder.name)
    assert code == 0, err
    forget()
    load_plugin(write(plugin.parent, PLUGIN))
    whole = start(compose("quickstart_fedavg", [*SMALL, *MINE, "run.root=whole"]))
    assert facts(folder) == facts(whole)


def test_a_run_by_a_given_name_is_refused_with_a_changed_plugin(
    plugin: Path, fedlens: Call
) -> None:
    words = ["run", "quickstart_fedavg", *SMALL, *MINE, "run.name=fixed", "--plugin", "mine.py"]
    assert fedlens(*words)[0] == 0
    (Path("runs") / "fixed" / "result.json").unlink()
    plugin.write_text(PLUGIN + "\n")
    code, _, err = fedlens(*words)
    assert code == 2
    assert "load the same file again" in err


def test_a_dotted_path_is_run_and_resumed(
    plugin: Path, fedlens: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*SMALL, "algorithm.aggregator=mine.plain", "algorithm.aggregator.factor=0.3"]
    assert interrupted_at(compose("quickstart_fedavg", words), 6, monkeypatch)
    folder = only_run()
    assert "plain-factor-0.3" in folder.name
    forget()
    plugin.unlink()
    code, _, err = fedlens("resume", folder.name)
    assert code == 0, err
    decorated = ["algorithm.aggregator=damped", "algorithm.aggregator.factor=0.3"]
    load_plugin(write(plugin.parent, PLUGIN))
    other = start(compose("quickstart_fedavg", [*SMALL, *decorated, "run.root=decorated"]))
    assert facts(folder)["metrics"] == facts(other)["metrics"]


# --- other processes -----------------------------------------------------------------------------


@pytest.mark.parametrize(("threads", "workers"), [(1, 2), (2, 1)])  # forked, and spawned
def test_worker_processes_have_the_rows(plugin: Path, threads: int, workers: int) -> None:
    load_plugin(plugin)
    own = [f"engine.threads_per_client={threads}"]
    one = [*SMALL, *MINE, *own, "engine.vectorise=false"]
    many = [*SMALL, *MINE, "engine=parallel", f"engine.workers={workers}", *own, "run.root=many"]
    serial, parallel = (start(compose("quickstart_fedavg", words)) for words in (one, many))
    assert facts(serial) == facts(parallel)


SUITE = f"""
plugins: [mine.py]
rows:
  mean: quickstart_fedavg {" ".join(SMALL)}
  damped: quickstart_fedavg {" ".join([*SMALL, *MINE])}
  dotted: quickstart_fedavg {" ".join([*SMALL, MINE[1]])} algorithm.aggregator=mine.plain
"""


def test_the_runs_of_a_suite_have_the_rows(plugin: Path, fedlens: Call) -> None:
    write(plugin.parent, SUITE, "suite.yaml")
    code, out, err = fedlens("suite", "suite.yaml", "--jobs", "2")
    assert code == 0, out + err
    results = [folder.result or {} for folder in runs(Path("runs"))]
    assert [bool(result) for result in results] == [True] * 3
    labels = {result["labels"]["algorithm"] for result in results}
    assert labels == {"FedAvg", "damped mean", "plain"}


@pytest.mark.skipif(sys.platform == "win32", reason="submitit needs a POSIX system")
def test_jobs_of_submitit_end_to_end(plugin: Path, fedlens: Call) -> None:
    """On submitit's local executor: two runs, one of which fails, each its own command.

    A job imports torch again, so the other one has a row of the plugin and a dotted path.
    """
    broken = f"  broken: quickstart {' '.join([*TINY, 'train.epochs=2', 'train.lr=1e30'])}\n"
    write(plugin.parent, SUITE + broken, "suite.yaml")
    words = ["suite", "suite.yaml", "--only", "dotted"]
    jobs = ["--only", "broken", "--launcher", "local", "--jobs", "2", "run.root=jobs"]
    code, out, err = fedlens(*words, *jobs)
    assert code == 2, err
    assert "failed: broken, seed 0: The loss became" in out
    (folder,) = [folder for folder in runs(Path("jobs")) if folder.result]
    assert folder.result is not None
    assert folder.result["labels"]["algorithm"] == "plain"
    assert folder.manifest is not None
    assert folder.manifest["sessions"][0]["command"].startswith("fedlens run quickstart_fedavg ")
    assert fedlens(*words, "run.root=alone")[0] == 0
    assert facts(folder) == facts(RunFolder(Path("alone") / folder.name))
    assert list((Path("jobs") / "slurm").glob("*_log.out"))


def test_a_search_has_the_rows_and_its_best_names_the_plugin(plugin: Path, fedlens: Call) -> None:
    code, out, err = fedlens(
        *(
            "tune",
            "quickstart_fedavg",
            *SMALL,
            MINE[0],
            "train.lr=0.1",
            "train.schedule.name=cosine",
        ),
        *("--search", "algorithm.aggregator.factor=0.3,0.6", "--trials", "2"),
        *("--plugin", "mine.py"),
    )
    assert code == 0, err
    (best,) = Path("runs/tune").glob("*/best.yaml")
    assert yaml.safe_load(best.read_text())["plugins"] == [str(plugin)]
    forget()
    code, out, err = fedlens("config", str(best))
    assert code == 0, err
    assert "name: damped" in out


# --- Flower --------------------------------------------------------------------------------------


def over_flower(config: Config, name: str = "flower") -> Config:
    kept = {"threads_per_client": 1, "vectorise": False}
    settings = engine.settings({"name": name, **kept}, "engine")
    return replace(config, engine=settings, run=replace(config.run, root=name))


@pytest.fixture
def federation(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Config, Any]]:
    """A config with rows of a plugin, and two nodes in this process that import nothing."""
    pytest.importorskip("flwr")
    from fedlens.experiments.flower import SERVER_SHARD, apps
    from fedlens.experiments.preparation.local_data import write_shards
    from fedlens.federated.flower import client_app
    from tests.federated.flower.inprocess import InProcessGrid

    load_plugin(plugin)
    config = compose("quickstart_fedavg", [*SMALL, *MINE, "engine.vectorise=false",
                                           "engine.threads_per_client=1"])  # fmt: skip
    write_shards(config, Path("shards"), 2)
    monkeypatch.setenv(SERVER_SHARD, str(plugin.parent / "shards" / "server"))
    for cached in (apps._session, apps._shard, client_app._stored, apps.protection_of):
        cached.cache_clear()
    configs: dict[int, dict[str, Any]] = {
        100 + i: {apps.SHARD: str(plugin.parent / "shards" / f"node-{i}")} for i in range(2)
    }
    with plugins.only_loaded():
        yield config, InProcessGrid(apps.client, configs, None)


def test_nodes_with_the_same_plugin_give_the_bits_of_one_process(
    federation: tuple[Config, Any],
) -> None:
    config, grid = federation
    assert facts(start(over_flower(config), grid=grid)) == facts(start(config))


@pytest.mark.parametrize(
    ("found", "sent", "says"),
    [
        ("mine.py:", f"mine.py:{'0' * 8}", "start the node with the same --plugin"),
        ('"name": "damped"', '"name": "undamped"', "start the node with the same --plugin"),
        ('"name": "damped"', '"name": "mine.plain_"', "refuses the setup"),
        ('"name": "damped"', '"name": "os.system"', "start the node with the same --plugin"),
    ],
)
def test_a_node_refuses_a_server_that_names_another_plugin(
    federation: tuple[Config, Any],
    monkeypatch: pytest.MonkeyPatch,
    found: str,
    sent: str,
    says: str,
) -> None:
    from fedlens.experiments.flower import clients
    from fedlens.federated.flower.setup import Setup

    honest = clients.encode_setup

    def changed(*arguments: Any, **options: Any) -> Setup:
        setup = honest(*arguments, **options)
        assert found in setup.config
        return Setup(setup.config.replace(found, sent), setup.tensors)

    monkeypatch.setattr(clients, "encode_setup", changed)
    config, grid = federation
    with pytest.raises(FedlensError, match=says):
        start(over_flower(config), grid=grid)


def test_a_simulation_has_the_rows(plugin: Path) -> None:
    """In a process of its own, as Ray leaves files and processes open."""
    pytest.importorskip("ray")
    load_plugin(plugin)
    own = ["engine.vectorise=false", "engine.threads_per_client=1"]
    command = [str(Path(sys.executable).with_name("fedlens")), "run", "quickstart_fedavg"]
    words = [*SMALL, *MINE, "engine=flower_simulation", "engine.workers=1", *own]
    done = subprocess.run([*command, *words, "run.root=simulated", "--plugin", "mine.py"],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    serial = start(compose("quickstart_fedavg", [*SMALL, *MINE, *own]))
    assert facts(only_run("simulated")) == facts(serial)


def test_the_processes_of_a_simulation_load_the_plugin_first(plugin: Path) -> None:
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    from fedlens.experiments.flower import apps

    load_plugin(plugin)
    app = cloudpickle.dumps(apps.simulation(plugins.loaded()))
    plugin.unlink()
    forget()
    cloudpickle.loads(app)
    assert REGISTRIES["aggregator"]["damped"].label == "damped mean"


def test_a_server_app_loads_what_its_superlink_was_given(
    federation: tuple[Config, Any], plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    from fedlens.config.compose import to_yaml
    from fedlens.experiments.flower import SERVER_PLUGINS, apps

    config, grid = federation
    grid._retry_invoker = SimpleNamespace(max_time=None)
    context: Any = SimpleNamespace(run_config={"config": to_yaml(over_flower(config))})
    forget()
    with pytest.raises(FedlensError, match=r"not loaded here: add --plugin mine\.py"):
        apps.main(grid, context)
    monkeypatch.setenv(SERVER_PLUGINS, str(plugin))
    apps.main(grid, context)
    assert only_run("flower").result is not None


# --- the command line -----------------------------------------------------------------------------


def test_every_command_that_composes_or_runs_has_the_option(fedlens: Call) -> None:
    for words in (
        *(["run"], ["resume"], ["suite"], ["tune"], ["config"], ["data", "partition"]),
        *(["masks", "show"], ["arithmetic", "alpha"], ["arithmetic", "merge"]),
        *(["flower", "partition"], ["flower", "node"], ["flower", "superlink"], ["flower", "up"]),
    ):
        assert "--plugin" in fedlens(*words, "--help")[1], words


def test_rows_of_a_plugin_are_listed(plugin: Path, fedlens: Call) -> None:
    code, out, err = fedlens("config", "rows", "aggregator", "--plugin", "mine.py")
    assert code == 0, err
    assert "damped" in out
    assert "from: mine:damped" in out
    assert "damped" in REGISTRIES["aggregator"]
