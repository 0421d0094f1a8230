"""Rows from outside: how files, dotted paths and packages are loaded, known and refused."""

import hashlib
import pickle
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import torch

import fedlens as fl
from fedlens import plugins
from fedlens.config import compose as composing
from fedlens.config.compose import compose, from_yaml, load, to_yaml
from fedlens.config.identity import identity, run_name
from fedlens.config.labels import labels
from fedlens.errors import FedlensError
from fedlens.plugins import PluginError
from fedlens.registry import REGISTRIES, load_plugin
from fedlens.suites.plan import plan
from fedlens.suites.suite import find

DAMPED = '''
import fedlens as fl

@fl.aggregator(label="damped mean")
def damped(updates, weights, *, factor: float = 0.5):
    """Half of the mean."""
    return {n: factor * sum(w * u[n] for w, u in zip(weights, updates)) / sum(weights)
            for n in updates[0]}

def plain(updates, weights, *, factor: float = 0.5):
    return damped(updates, weights, factor=factor)

@fl.mask_rule(label="my rule", sensitivity=False)
def my_rule(weight, sensitivity):
    return weight

@fl.diagnostic(label="how many")
class HowMany:
    def __init__(self, start):
        self.count = 0

    def add(self, delta, norm, weight):
        self.count += 1

    def result(self, mean):
        return self.count

NUMBER = 3
'''
CHOSEN = ["algorithm.aggregator=damped", "algorithm.aggregator.factor=0.3"]

Sentence = Callable[..., str]


def write(folder: Path, text: str = DAMPED, name: str = "mine.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(FedlensError) as raised:
        call()
    return str(raised.value)


# --- what a config knows of it -------------------------------------------------------------------


def test_a_row_has_the_name_and_the_hash_of_its_file(no_plugins: Path) -> None:
    path = write(no_plugins)
    load_plugin(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    config = compose("fedavg_iid", CHOSEN)
    chosen = config.algorithm.aggregator
    assert chosen == {"name": "damped", "factor": 0.3, "plugin": f"mine.py:{digest}"}
    assert chosen.parameters == {"factor": 0.3}
    assert labels(config)["algorithm"] == "damped mean, factor 0.3"
    assert from_yaml(to_yaml(config), "it") == config


def test_a_plugin_that_is_not_used_changes_no_name(no_plugins: Path) -> None:
    before = run_name(compose("fedavg_iid", []))
    load_plugin(write(no_plugins))
    assert run_name(compose("fedavg_iid", [])) == before


def test_a_changed_plugin_makes_another_run_wherever_the_file_lies(no_plugins: Path) -> None:
    path = write(no_plugins)
    load_plugin(path)
    first = run_name(compose("fedavg_iid", CHOSEN))
    load_plugin(write(no_plugins, name="elsewhere/mine.py"))  # the same content: nothing to do
    assert run_name(compose("fedavg_iid", CHOSEN)) == first
    path.write_text(DAMPED + "\n# changed\n")
    load_plugin(path)
    assert run_name(compose("fedavg_iid", CHOSEN)) != first


def test_a_changed_plugin_has_the_rows_that_it_has_now(no_plugins: Path) -> None:
    path = write(no_plugins)
    load_plugin(path)
    path.write_text(DAMPED.replace("def my_rule", "def our_rule"))
    load_plugin(path)
    assert "our_rule" in fl.mask_rule
    assert "my_rule" not in fl.mask_rule
    path.write_text("import fedlens\n")
    assert "registers nothing" in refusal(lambda: load_plugin(path))
    assert "our_rule" in fl.mask_rule  # a file that is refused takes nothing away


def test_a_suite_composes_anew_when_a_plugin_has_changed(no_plugins: Path) -> None:
    suite = write(no_plugins, "plugins: [mine.py]\nrows: {one: fedavg_iid "
                  "algorithm.aggregator=damped backbone.resolution=32}\n", "s.yaml")  # fmt: skip
    path = write(no_plugins)
    first = plan(find(str(suite)).cells())[0]
    path.write_text(DAMPED + "\n")
    second = plan(find(str(suite)).cells())[0]
    assert first.folder.name != second.folder.name
    assert second.job(print).arguments[-2:] == ["--plugin", str(path)]


def test_a_diagnostic_is_part_of_what_a_run_is(no_plugins: Path) -> None:
    load_plugin(write(no_plugins))
    config = compose("fedavg_iid", ["federated.diagnostics=[drift,how_many]"])
    word = fl.diagnostic["how_many"].plugin.word  # type: ignore[union-attr]
    assert identity(config)["federated.diagnostics.how_many"] == word
    assert list(composing.plugins_of(config)) == ["federated.diagnostics.how_many"]


def test_the_command_of_a_config_names_its_plugin(no_plugins: Path) -> None:
    path = write(no_plugins)
    load_plugin(path)
    assert composing.command(compose("fedavg_iid", CHOSEN)) == [
        *("fedlens", "run", "fedavg_iid", *CHOSEN, "--plugin", str(path)),
    ]
    assert "--plugin" not in composing.command(compose("fedavg_iid", []))


@pytest.mark.parametrize("style", ["plugins: [mine.py]\n", "plugins:\n  - mine.py\n"])
def test_an_experiment_names_its_plugins(no_plugins: Path, style: str) -> None:
    write(no_plugins, name="below/mine.py")
    text = (
        f"# @package _global_\n# mine\n{style}defaults: [/experiment/fedavg_iid]\n"
        "train: {lr: 1e-3}\nalgorithm: {aggregator: {name: damped}}\n"
    )
    path = write(no_plugins, text, "below/it.yaml")
    config = compose(str(path), [])
    assert (config.algorithm.aggregator.name, config.train.lr) == ("damped", 0.001)
    path.write_text(text.replace(style, "plugins: mine.py\n"))
    assert "plugins must be a list of files" in refusal(lambda: compose(str(path), []))


# --- dotted paths --------------------------------------------------------------------------------


def test_a_dotted_path_names_a_plain_function_of_this_folder(no_plugins: Path) -> None:
    write(no_plugins)
    config = compose("fedavg_iid", ["algorithm.aggregator=mine.plain",
                                    "algorithm.aggregator.factor=0.3"])  # fmt: skip
    row = composing.row_of(config, "algorithm.aggregator")
    assert (row.name, row.label, row.make) == ("mine.plain", "plain", sys.modules["mine"].plain)
    assert config.algorithm.aggregator.factor == 0.3
    assert config.algorithm.aggregator.plugin.startswith("mine.py:")
    unread = refusal(lambda: compose("fedavg_iid", ["algorithm.aggregator=mine.plain",
                                                    "algorithm.aggregator.fac=1"]))  # fmt: skip
    assert "algorithm.aggregator.fac is not read by algorithm.aggregator=mine.plain" in unread


def test_a_decorated_function_keeps_its_label(no_plugins: Path) -> None:
    write(no_plugins, name="lab/methods.py")
    config = compose("fedavg_iid", ["algorithm.aggregator=lab.methods.damped"])
    assert labels(config)["algorithm"] == "damped mean"
    assert config.algorithm.aggregator.plugin.startswith("lab/methods.py:")


def test_a_dotted_path_is_found_in_a_loaded_plugin_first(no_plugins: Path) -> None:
    write(no_plugins, DAMPED + "\n# another\n")
    path = write(no_plugins, name="elsewhere/mine.py")
    load_plugin(path)
    compose("fedavg_iid", ["algorithm.aggregator=mine.plain"])
    assert REGISTRIES["aggregator"]["mine.plain"].plugin.path == path  # type: ignore[union-attr]


def test_names_with_colons_slashes_and_versions_are_not_paths() -> None:
    for name in ("timm:resnet18.a1_in1k", "huggingface:org/name", "org/name.v1", "1.5", "median"):
        assert not plugins.is_dotted(name)
    assert plugins.is_dotted("mine.f")
    assert plugins.is_dotted("a.b.c")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nowhere.f", "nowhere.f: there is no module 'nowhere' in"),
        ("mine.damp", "the module 'mine' has no 'damp': did you mean 'damped'?"),
        ("mine.NUMBER", "mine.NUMBER is not a function or class (its type is int)."),
        (
            "mine.my_rule",
            "mine.my_rule is decorated as mask_rule and cannot be used as aggregator.",
        ),
        ("broken.f", "broken.py, line 2: the plugin does not import (ZeroDivisionError"),
        ("needy.f", "needy.py, line 1: the plugin does not import (ModuleNotFoundError"),
        ("short.f", "f must take (updates, weights)."),
    ],
)
def test_a_wrong_dotted_path_is_one_sentence(no_plugins: Path, path: str, says: str) -> None:
    write(no_plugins)
    write(no_plugins, "x = 1\ny = 1 / 0\n", "broken.py")
    write(no_plugins, "import a_module_that_is_not_there\n", "needy.py")
    write(no_plugins, "def f(updates): ...\n", "short.py")
    assert says in refusal(lambda: compose("fedavg_iid", [f"algorithm.aggregator={path}"]))


# --- files that are refused ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def f(:\n", "mine.py, line 1: the plugin does not import (SyntaxError"),
        ("import fedlens\n\n1 / 0\n", "mine.py, line 3: the plugin does not import (ZeroDivision"),
        ("raise SystemExit(3)\n", "mine.py, line 1: the plugin does not import (SystemExit"),
        ("import fedlens\n", "mine.py registers nothing: decorate a function with @fl.aggregator"),
        (DAMPED.replace("def damped", "def median"), "'median' exists already (fedlens."),
        (DAMPED.replace("(updates, weights, *, factor", "(updates, *, factor"),
         "damped must take (updates, weights)."),
        (DAMPED.replace("weights, *, factor", "weights, factor"),
         "must take (updates, weights): write its parameters behind a *, as in (updates, weights, "
         "*, factor)."),
        (DAMPED.replace("(weight, sensitivity)", "(weight, sensitivity, more)"),
         "my_rule must take (weight, sensitivity)."),
        (DAMPED.replace("factor: float", "name: float"), "cannot be called 'name'"),
    ],
)  # fmt: skip
def test_a_wrong_plugin_is_one_sentence(no_plugins: Path, text: str, says: str) -> None:
    path = write(no_plugins, text)
    message = refusal(lambda: load_plugin(path))
    assert says in message
    assert "\n" not in message
    assert "mine" not in sys.modules
    assert all(not registry.added for registry in REGISTRIES.values())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none.py", "none.py cannot be read: No such file"),
        ("mine.txt", "mine.txt is not a Python file, such as mine.py."),
        ("random.py", "random.py has the name of another module"),
        ("torch.py", "torch.py has the name of another module"),
        ("flwr.py", "flwr.py has the name of another module"),
    ],
)
def test_a_file_that_cannot_be_a_plugin_is_refused(no_plugins: Path, name: str, says: str) -> None:
    if name != "none.py":
        write(no_plugins, name=name)
    assert says in refusal(lambda: load_plugin(no_plugins / name))


def test_two_plugins_cannot_have_one_name(no_plugins: Path) -> None:
    load_plugin(write(no_plugins))
    other = write(no_plugins, DAMPED + "\n", "b/mine.py")
    assert "has the name of another module" in refusal(lambda: load_plugin(other))


def test_a_plugin_may_import_files_beside_it(no_plugins: Path) -> None:
    write(no_plugins, "FACTOR = 0.25\n", "b/beside_mine.py")
    text = "from beside_mine import FACTOR\n" + DAMPED.replace("float = 0.5", "float = FACTOR")
    load_plugin(write(no_plugins, text, "b/mine.py"))
    assert fl.aggregator["damped"].defaults == {"factor": 0.25}
    assert str(no_plugins / "b") not in sys.path


# --- a stored config -----------------------------------------------------------------------------


def kept(folder: Path) -> Path:
    """A run's folder with a config and the copy of its plugin."""
    load_plugin(write(folder))
    config = compose("fedavg_iid", CHOSEN)
    run = folder / "run"
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(config))
    copy = plugins.copy_path(run, config.algorithm.aggregator.plugin)
    assert copy.relative_to(run).as_posix() == f"plugins/{copy.parent.name}/mine.py"
    write(copy.parent)
    return run


def forget() -> None:
    """As in a new process."""
    for registry in REGISTRIES.values():
        registry.added = {}
    plugins._files.clear()
    plugins._imported.clear()
    sys.modules.pop("mine", None)


def test_a_run_is_read_with_the_copy_in_its_folder(no_plugins: Path) -> None:
    run = kept(no_plugins)
    forget()
    (no_plugins / "mine.py").unlink()
    assert load(run / "config.yaml").algorithm.aggregator.factor == 0.3


def test_a_run_is_refused_with_a_changed_plugin(no_plugins: Path) -> None:
    run = kept(no_plugins)
    forget()
    load_plugin(write(no_plugins, DAMPED + "\n"))
    with pytest.raises(PluginError, match=(
        r"^algorithm.aggregator=damped comes from the plugin mine\.py \(\w{8}\), but mine\.py "
        r"\(\w{8}\) is loaded here: load the same file again .*, or start another run\.$"
    )):  # fmt: skip
        load(run / "config.yaml")


def test_a_changed_copy_is_refused(no_plugins: Path) -> None:
    run = kept(no_plugins)
    forget()
    copy = next(run.glob("plugins/*/mine.py"))
    copy.write_text(DAMPED + "\n")
    with pytest.raises(PluginError, match=r"mine\.py was changed after the run began: restore"):
        load(run / "config.yaml")


def test_without_plugin_and_copy_it_says_which_is_missing(no_plugins: Path) -> None:
    run = kept(no_plugins)
    forget()
    next(run.glob("plugins/*/mine.py")).unlink()
    with pytest.raises(PluginError, match=r"not loaded here: add --plugin mine\.py\.$"):
        load(run / "config.yaml")


def test_a_dotted_path_of_a_stored_config_is_found_in_its_copy(no_plugins: Path) -> None:
    write(no_plugins)
    config = compose("fedavg_iid", ["algorithm.aggregator=mine.plain"])
    (no_plugins / "config.yaml").write_text(to_yaml(config))
    write(plugins.copy_path(no_plugins, config.algorithm.aggregator.plugin).parent)
    forget()
    (no_plugins / "mine.py").write_text(DAMPED + "\n")  # of another run by now
    assert load(no_plugins / "config.yaml") == config


# --- where nothing may be loaded -----------------------------------------------------------------


def test_only_what_is_loaded_counts_where_a_server_names_rows(no_plugins: Path) -> None:
    write(no_plugins, "raise SystemError('this must not run')\n")
    text = to_yaml(compose("fedavg_iid", [])).replace("name: mean", "name: mine.plain")
    with plugins.only_loaded(), pytest.raises(FedlensError, match=r"mine\.plain is unknown"):
        from_yaml(text, "The setup")
    named = text.replace("name: mine.plain", f"name: mine.plain\n    plugin: mine.py:{'0' * 64}")
    with plugins.only_loaded(), pytest.raises(PluginError, match="not loaded here: add --plugin"):
        from_yaml(named, "The setup")
    assert "mine" not in sys.modules


# --- installed packages --------------------------------------------------------------------------


@pytest.fixture
def installed(no_plugins: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that is installed and declares the module `published_rows`."""
    path = write(no_plugins, name="published_rows.py")
    monkeypatch.syspath_prepend(str(no_plugins))
    entry = EntryPoint("mine", "published_rows", plugins.GROUP)
    found = EntryPoints([entry])
    monkeypatch.setattr(plugins, "entry_points", lambda group: found.select(group=group))
    return path


def test_an_installed_package_is_loaded_when_a_row_is_missing(installed: Path) -> None:
    compose("fedavg_iid", ["algorithm.aggregator=median"])
    assert "published_rows" not in sys.modules  # what the package has needs no other
    config = compose("fedavg_iid", CHOSEN)
    assert config.algorithm.aggregator.plugin.startswith("published_rows.py:")
    assert composing.command(config)[-1] == CHOSEN[-1]  # it needs no option


def test_an_installed_package_is_not_loaded_for_a_server(installed: Path) -> None:
    text = to_yaml(compose("fedavg_iid", [])).replace("name: mean", "name: damped")
    with plugins.only_loaded(), pytest.raises(FedlensError, match="damped is unknown"):
        from_yaml(text, "The setup")
    assert "published_rows" not in sys.modules


def test_a_package_that_does_not_load_is_named(installed: Path) -> None:
    installed.write_text("1 / 0\n")
    message = refusal(lambda: compose("fedavg_iid", CHOSEN))
    assert "published_rows" in message
    assert "line 1: the plugin does not import (ZeroDivisionError" in message


# --- functions given to the library --------------------------------------------------------------


def test_a_plain_function_is_a_mask_rule() -> None:
    model = torch.nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[4.0, 3.0, 2.0, 1.0]]))

    def smallest(weight: Any, sensitivity: Any, *, power: int = 1) -> Any:
        return weight**power * sensitivity

    scores = {"weight": torch.ones(1, 4)}
    expected = {"weight": torch.tensor([[False, False, True, True]])}
    masks = fl.mask(model, scores, rule=smallest, density=0.5, power=3)
    assert torch.equal(masks["weight"], expected["weight"])
    inputs = torch.ones(3, 4)
    masks = fl.calibrate(model, inputs, rule=smallest, density=0.5, rounds=2)
    assert torch.equal(masks["weight"], expected["weight"])
    assert "smallest" not in fl.mask_rule
    with pytest.raises(FedlensError, match=r"^<lambda> must take \(weight, sensitivity\)\.$"):
        fl.mask(model, scores, rule=lambda weight: weight, density=0.5)


def test_a_plain_function_samples_partitions_merges_and_aggregates() -> None:
    data = torch.randn(20, 3), torch.arange(20) % 2
    clients = fl.partition(data[1], clients=4, by=lambda labels, clients, seed:
                           torch.arange(len(labels)) % clients)  # fmt: skip

    def first(updates: Any, weights: Any) -> Mapping[str, Any]:
        return dict(updates[0])

    fed = fl.fedavg(torch.nn.Linear(3, 2), data, clients, lr=0.1, local_steps=1, batch_size=5,
                    aggregator=first)  # fmt: skip
    state = fed.init()
    cohort = fed.sample(state, 0.5, sampling=lambda seed, round_, clients, size: [1, 3])
    assert cohort.drawn == (1, 3)
    _, report = fed.apply(state, cohort)
    assert report.accepted == (1, 3)
    for call, says in [
        (lambda: fed.sample(state, sampling=lambda seed, clients: [0]),
         "must take (seed, round, clients, size)"),
        (lambda: fl.partition(data[1], clients=2, by=lambda labels: labels),
         "must take (labels, clients, seed)"),
        (lambda: fl.merge([{"w": torch.ones(1)}], method=lambda vectors: vectors[0]),
         "must take (vectors, weights)"),
        (lambda: fl.fedavg(torch.nn.Linear(3, 2), data, clients, lr=0.1, local_steps=1,
                           batch_size=5, aggregator=lambda updates: updates[0]),
         "must take (updates, weights)"),
    ]:  # fmt: skip
        assert says in refusal(call)


def test_rows_of_a_file_can_be_pickled_for_another_process(no_plugins: Path) -> None:
    load_plugin(write(no_plugins))
    row = fl.aggregator["damped"]
    assert pickle.loads(pickle.dumps(row)) is not None
    content = pickle.dumps((plugins.loaded(), row, sys.modules["mine"].HowMany(None)))
    (no_plugins / "sent").write_bytes(content)
    (no_plugins / "mine.py").unlink()  # what is sent is the source itself
    code = "import pickle; it = pickle.load(open('sent', 'rb')); print(it[1].label, it[2].count)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "damped mean 0\n"


def test_functions_that_are_typed_in_come_from_no_file() -> None:
    module = types.ModuleType("typed_in")
    exec("def f(updates, weights): ...", module.__dict__)
    assert plugins.of(module.f) is None
    assert plugins.of(torch.nn.Linear) is not None
