"""Rows of the registry: read from source as they are at run time, checked, named and extended."""

import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import inf, nan
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlens import registry as registry_module
from fedlens.config.compose import changed, command, compose, from_yaml, to_yaml
from fedlens.config.identity import identity, run_name
from fedlens.config.labels import labels
from fedlens.config.schema import ROW_KEYS, Config
from fedlens.errors import FedlensError
from fedlens.registry import (
    REGISTRIES,
    REQUIRED,
    Parameter,
    Range,
    Registry,
    Row,
    RowSettings,
    aggregator,
    find,
    mask_rule,
    merge_method,
    partitioner,
)

ROWS = [row for registry in REGISTRIES.values() for row in registry]
CHOICES = [(key, row) for key, kind in ROW_KEYS.items() for row in REGISTRIES[kind]]
PARAMETERS = [(row, one) for row in ROWS for one in row.parameters]
NEEDED = {  # what a row must be told besides its name
    "folder": {"root": "photos"},
    "torchvision": {"dataset": "CIFAR10"},
    "huggingface": {"dataset": "somebody/digits"},
    "file": {"file": "split.json"},
}
EXPERIMENTS = {"sparse.rule": "sparse_fedavg"}  # of others, fedavg_iid


def name_of(value: object) -> str | None:
    if isinstance(value, Row):
        return f"{value.kind}-{value.name}"
    return value.name if isinstance(value, Parameter) else None


def chosen(row: Row) -> dict[str, Any]:
    """The row by its name, with a word for every parameter that it cannot do without."""
    needed = [one.name for one in row.parameters if one.default is REQUIRED]
    return {"name": row.name, **dict.fromkeys(needed, "something"), **NEEDED.get(row.name, {})}


@cache
def base(key: str) -> Config:
    return compose(EXPERIMENTS.get(key, "fedavg_iid"), [])


# --- rows as they are written --------------------------------------------------------------------


def imported(registry: Registry) -> list[Row]:
    """The package's own rows of one kind, made by executing their modules."""
    rows: list[Row] = []

    def record(
        self: Registry, *, label: str, paper: str = "", name: str | None = None, **traits: Any
    ) -> Callable[[Any], Any]:
        def add(function: Any) -> Any:
            if self is registry:
                rows.append(registry_module._row_of(self, function, label, paper, name, traits))
            return function

        return add

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Registry, "__call__", record)
        for row in registry_module._written(registry.kind):
            assert row.make  # imports its module, in which dataclasses look up names
        modules = {row.source.partition(":")[0] for row in registry_module._written(registry.kind)}
        for module in modules:
            found = importlib.util.find_spec(module)
            assert found is not None
            assert found.origin is not None
            spec = importlib.util.spec_from_file_location(module, found.origin)
            assert spec is not None
            assert spec.loader is not None
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return rows


@pytest.mark.parametrize("kind", REGISTRIES)
def test_rows_read_from_source_are_those_of_the_imported_modules(kind: str) -> None:
    written = {row.name: row for row in registry_module._written(kind)}
    executed = {row.name: row for row in imported(REGISTRIES[kind])}
    assert written == executed
    assert written


@pytest.mark.parametrize("kind", REGISTRIES)
def test_every_decorated_function_of_the_package_is_found(kind: str) -> None:
    root = Path(registry_module.__file__).parent
    decorated = {
        ".".join(("fedlens", *path.relative_to(root).with_suffix("").parts))
        for path in root.rglob("*.py")
        if f"\n@{kind}(" in path.read_text(encoding="utf-8")
    }
    rows = registry_module._written(kind)
    assert {row.source.partition(":")[0] for row in rows} == decorated


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_every_row_says_what_it_is_and_can_be_made(row: Row) -> None:
    assert row.label
    assert row.doc
    assert callable(row.make)
    assert row.described({})
    names = [one.name for one in row.parameters]
    assert len(names) == len(set(names))
    assert all(one.help for one in row.parameters if row.kind != "question")


@pytest.mark.parametrize(("row", "parameter"), PARAMETERS, ids=name_of)
def test_every_default_is_a_value_of_its_parameter(row: Row, parameter: Parameter) -> None:
    if parameter.default is not REQUIRED:
        checked = parameter.checked(parameter.default, row.kind)
        assert checked == parameter.default
        assert type(checked) is type(parameter.default)


def test_labels_are_unique_among_the_rows_of_a_kind() -> None:
    for registry in REGISTRIES.values():
        shown = [row.label for row in registry]
        assert len(shown) == len(set(shown))


# --- numbers and types ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "inside", "outside", "words"),
    [
        ("[0, 0.5)", [0, 0.49], [-1e-9, 0.5, nan, inf], "in [0, 0.5)"),
        ("(0, 1]", [1e-9, 1], [0, 1.01, nan], "in (0, 1]"),
        ("(0, inf)", [1e-30, 1e30], [0, -1, inf, nan], "positive"),
        ("[1, inf)", [1, 2, 10**9], [0, 0.99, inf], "1 or more"),
        ("(2, inf)", [2.5], [2, 1], "above 2"),
        ("[-1, 1]", [-1, 0, 1], [-1.5, 2], "in [-1, 1]"),
    ],
)
def test_ranges(interval: str, inside: list[float], outside: list[float], words: str) -> None:
    known = Range(interval)
    assert all(value in known for value in inside)
    assert not any(value in known for value in outside)
    assert str(known) == words


@given(low=st.integers(-5, 5), width=st.integers(1, 5), value=st.floats(-12, 12))
def test_the_four_kinds_of_intervals_differ_at_their_ends_alone(
    low: int, width: int, value: float
) -> None:
    high = low + width
    for left, right in ("[]", "[)", "(]", "()"):
        known = Range(f"{left}{low}, {high}{right}")
        assert (low in known, high in known) == (left == "[", right == "]")
        if value not in (low, high):
            assert (value in known) == (low < value < high)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (float, 1, 1.0),
        (float, 0.5, 0.5),
        (float | None, None, None),
        (float | None, 2, 2.0),
        (int, 3, 3),
        (int | None, None, None),
        (int | float, 3, 3),
        (bool, True, True),
        (str, "a", "a"),
        (str | None, None, None),
        (Any, [1], [1]),
        (list[int], [1, 2], [1, 2]),
        (Literal["mean", "sum"], "sum", "sum"),
    ],
)
def test_values_of_a_parameters_type_are_kept(kind: Any, value: Any, expected: Any) -> None:
    checked = Parameter("it", kind).checked(value, "some.key")
    assert checked == expected
    assert type(checked) is type(expected)


@pytest.mark.parametrize(
    ("kind", "value", "complaint"),
    [
        (float, "fast", "some.key.it=fast must be float."),
        (float, True, "some.key.it=True must be float."),
        (float, None, "some.key.it=None must be float."),
        (int, 1.5, "some.key.it=1.5 must be int."),
        (int, True, "some.key.it=True must be int."),
        (int | None, "x", "some.key.it=x must be int or null."),
        (bool, 1, "some.key.it=1 must be bool."),
        (str, 1, "some.key.it=1 must be str."),
        (Literal["mean", "sum"], "summ", "some.key.it=summ is unknown: did you mean 'sum'?"),
    ],
)
def test_values_of_another_type_are_refused(kind: Any, value: Any, complaint: str) -> None:
    with pytest.raises(FedlensError) as caught:
        Parameter("it", kind).checked(value, "some.key")
    assert str(caught.value) == complaint


def outside(parameter: Parameter) -> Iterator[Any]:
    """Values that the parameter must refuse: of another type, or out of its range."""
    members = get_args(parameter.type) or (parameter.type,)
    yield 7 if {str, bool} & set(members) else "a word"
    if NoneType not in members:
        yield None
    if parameter.range is None:
        return
    low, high, closed_low, closed_high = parameter.range._bounds
    whole = int in members
    yield int(low) - closed_low if whole else low - closed_low
    if not whole:
        yield nan
        yield high + closed_high


@pytest.mark.parametrize(("row", "parameter"), PARAMETERS, ids=name_of)
def test_every_parameter_refuses_what_it_cannot_be(row: Row, parameter: Parameter) -> None:
    for value in outside(parameter):
        with pytest.raises(
            FedlensError, match=rf"^key\.{parameter.name}=.* (must be|is unknown)"
        ) as caught:
            REGISTRIES[row.kind].settings({**chosen(row), parameter.name: value}, "key")
        assert "\n" not in str(caught.value)


# --- keys that are not read ----------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_key_that_a_row_does_not_read_is_refused_with_the_rows_that_do(row: Row) -> None:
    registry = REGISTRIES[row.kind]
    own = {one.name for one in row.parameters}
    for other in {one.name for each in registry for one in each.parameters} - own:
        readers = [each.name for each in registry if other in {p.name for p in each.parameters}]
        with pytest.raises(FedlensError) as caught:
            registry.settings({"name": row.name, other: 1}, "key")
        assert str(caught.value) == (
            f"key.{other} is not read by key={row.name}: "
            f"leave it out, or choose {' or '.join(readers)}."
        )


def test_a_misspelt_key_is_suggested() -> None:
    with pytest.raises(FedlensError, match="not read by partition=dirichlet: did you mean 'alpha'"):
        partitioner.settings({"name": "dirichlet", "alhpa": 1}, "partition")
    with pytest.raises(FedlensError, match="not read by partition=iid: it has no parameters"):
        partitioner.settings({"name": "iid", "nonsense": 1}, "partition")


@pytest.mark.parametrize(
    ("choice", "complaint"),
    [
        ("dirichlett", "partition=dirichlett is unknown: did you mean 'dirichlet'?"),
        ({"alpha": 1}, "partition has no `name`: write partition=NAME."),
        ({"name": 3}, "partition has no `name`: write partition=NAME."),
    ],
)
def test_an_unknown_row_is_refused(choice: Any, complaint: str) -> None:
    with pytest.raises(FedlensError) as caught:
        partitioner.settings(choice, "partition")
    assert str(caught.value) == complaint
    with pytest.raises(FedlensError, match="There is no partition 'x': choose from "):
        partitioner["x"]


def test_a_composed_config_refuses_a_key_that_its_row_does_not_read() -> None:
    with pytest.raises(FedlensError, match=r"partition\.classes_per_client is not read by"):
        compose("fedavg_iid", ["partition.classes_per_client=5"])


# --- rows from outside ---------------------------------------------------------------------------


@pytest.fixture
def registry() -> Iterator[Registry]:
    """A kind of its own, forgotten after the test."""
    made = Registry(
        "gadget",
        (),
        what="gadget",
        common=(
            Parameter("size", int, 3, Range("[1, inf)"), "of every gadget"),
            Parameter("frozen", bool, registry_module.FromTrait("fitted", True), None, "as told"),
        ),
    )
    yield made
    del REGISTRIES["gadget"]


def test_a_function_a_class_and_a_dataclass_become_rows(registry: Registry) -> None:
    @registry(label="a function of {power}", paper="Someone, 2020", fitted=False, colour="red")
    def some_function(
        data: "not_imported.Type",  # type: ignore[name-defined]  # noqa: F821
        *,
        power: Annotated[float, Range("(0, 1]"), "how strong"] = 0.5,
        plain: int = 2,
        free=None,  # type: ignore[no-untyped-def]
        needed: "Annotated[str, 'in quotes']",
    ) -> float:
        """The first
        paragraph.

        The second.
        """
        return power * plain

    @registry(label="a class")
    class SomeClass:
        """A class."""

        def __init__(self, *, beta: Annotated[float, Range("[0, 1)")] = 0.9) -> None:
            self.beta = beta

    @registry(label="a dataclass", name="other")
    @dataclass(frozen=True, kw_only=True)
    class SomeFields:
        """Fields."""

        gamma: Annotated[int | None, "a field"] = None

    common = (
        Parameter("size", int, 3, Range("[1, inf)"), "of every gadget"),
        Parameter("frozen", bool, True, None, "as told"),
    )
    row = registry["some_function"]
    assert (row.kind, row.label, row.paper) == ("gadget", "a function of {power}", "Someone, 2020")
    assert row.doc == "The first paragraph."
    assert row.traits == {"fitted": False, "colour": "red"}
    assert row.make is some_function
    assert row.parameters == (
        Parameter("power", float, 0.5, Range("(0, 1]"), "how strong"),
        Parameter("plain", int, 2),
        Parameter("free", Any, None),
        Parameter("needed", str, REQUIRED, None, "in quotes"),
        common[0],
        Parameter("frozen", bool, False, None, "as told"),
    )
    assert registry["some_class"].make is SomeClass
    assert registry["some_class"].parameters == (
        Parameter("beta", float, 0.9, Range("[0, 1)")),
        *common,
    )
    assert registry["other"].make is SomeFields
    assert registry["other"].parameters == (
        Parameter("gamma", int | None, None, None, "a field"),
        *common,
    )
    assert registry.names == ["some_function", "some_class", "other"]
    with pytest.raises(FedlensError, match=r"^key=some_function needs key.needed \(in quotes\)\.$"):
        registry.settings("some_function", "key")
    settings = registry.settings({"name": "some_function", "needed": "x", "power": 1}, "key")
    values = {"power": 1.0, "plain": 2, "free": None, "needed": "x", "size": 3, "frozen": False}
    assert settings.parameters == values
    assert settings == {"name": "some_function", **values, "plugin": row.plugin.word}
    assert row.make(None, **{k: settings[k] for k in ("power", "plain", "free", "needed")}) == 2.0
    assert row.described(settings) == "a function of 1"
    assert row.described({"power": 0.25}) == "a function of 0.25"


def test_a_name_is_taken_once_but_a_module_may_be_loaded_again(registry: Registry) -> None:
    def gadget() -> None:
        """One."""

    registry(label="one")(gadget)
    registry(label="one, changed")(gadget)
    assert [row.label for row in registry] == ["one, changed"]

    def other() -> None:
        """Two."""

    with pytest.raises(FedlensError, match=r"'gadget' exists already \(.*\): choose another name"):
        registry(label="two", name="gadget")(other)


def test_a_row_of_the_package_cannot_be_replaced() -> None:
    def median() -> None:
        """Mine."""

    with pytest.raises(FedlensError, match=r"'median' exists already \(fedlens\."):
        aggregator(label="mine")(median)
    assert aggregator["median"].source.startswith("fedlens.")


def test_a_merging_method_from_outside_is_an_aggregator_too() -> None:
    @merge_method(label="my merge")
    def my_merge(
        vectors: Any, weights: Any, *, density: Annotated[float, Range("(0, 1]"), "kept"] = 0.3
    ) -> Any:
        """Mine."""
        return vectors

    try:
        row = aggregator["my_merge"]
        assert (row.kind, row.make) == ("aggregator", my_merge)
        config = compose("fedavg_iid", ["algorithm.aggregator=my_merge"])
        assert config.algorithm.aggregator.name == "my_merge"
        assert config.algorithm.aggregator.parameters == {"density": 0.3, "scale": 1.0}
        assert labels(config)["algorithm"] == "my merge"
        assert "average" not in aggregator  # it is FedAvg's mean
    finally:
        merge_method.added.clear()


def test_a_mask_rule_and_a_head_from_outside_need_no_traits() -> None:
    @mask_rule(label="my rule")
    def my_rule(weight: Any, sensitivity: Any) -> Any:
        """Mine."""
        return weight

    @REGISTRIES["head"](label="my head")
    def my_head(statistics: Any, validation: Any, *, power: float = 1.0) -> Any:
        """Mine."""

    try:
        config = compose("sparse_fedavg", ["sparse.rule=my_rule", "head=my_head"])
        assert config.head.name == "my_head"
        read = {"layers": 0, "tokens": "class", "random_features": None, "train_layers": None}
        assert config.head.parameters == {"power": 1.0, "freeze": True, "dropout": 0.0, **read}
        assert (labels(config)["mask_rule"], labels(config)["head"]) == ("my rule", "my head")
        assert "_my-rule-0.1_" in run_name(config)
    finally:
        mask_rule.added.clear()
        REGISTRIES["head"].added.clear()


# --- rows in configs -----------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_row_is_pickled_by_its_name(row: Row) -> None:
    again = pickle.loads(pickle.dumps(row))
    assert again == row
    assert again == find(row.kind, row.name)
    assert again.make is row.make


def test_settings_are_pickled_and_are_a_mapping() -> None:
    settings = partitioner.settings("dirichlet", "partition")
    again = pickle.loads(pickle.dumps(settings))
    assert again == settings == {"name": "dirichlet", "alpha": 0.3, "min_size": 10}
    assert type(again) is RowSettings
    assert again.but(alpha=1.0).parameters == {"alpha": 1.0, "min_size": 10}
    with pytest.raises(AttributeError, match="sigma"):
        _ = settings.sigma


@pytest.mark.parametrize("module", ["checks", "compose", "identity", "labels", "options", "schema"])
def test_configs_need_no_torch(module: str) -> None:
    code = f"import sys, fedlens.config.{module} as it; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("key", "row"), CHOICES, ids=name_of)
def test_every_row_can_be_chosen_and_survives_its_file_and_its_command(key: str, row: Row) -> None:
    experiment = EXPERIMENTS.get(key, "fedavg_iid")
    given = {k: v for k, v in chosen(row).items() if k != "name"}
    words = [f"{key}={row.name}", *(f"{key}.{name}={value}" for name, value in given.items())]
    config = compose(experiment, words)
    value = registry_value(config, key)
    assert value["name"] == row.name
    assert set(value.parameters) == {one.name for one in row.parameters}
    assert from_yaml(to_yaml(config), "its file") == config
    assert identity(compose(experiment, command(config)[3:])) == identity(config)


def registry_value(config: Config, key: str) -> RowSettings:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    assert isinstance(value, RowSettings)
    return value


def another(parameter: Parameter) -> Any:
    """A value in the parameter's range that is not its default."""
    members, default = get_args(parameter.type) or (parameter.type,), parameter.default
    if bool in members:
        return not default
    if get_origin(parameter.type) is Literal:
        return next(one for one in members if one != default)
    if str in members:
        return "elsewhere"
    low, high, _, _ = parameter.range._bounds if parameter.range else (0.0, inf, True, True)
    middle = low + 1 if high == inf else (low + high) / 2
    candidates = [middle, middle + 1 if high == inf else (low + middle) / 2]
    value = next(one for one in candidates if one != default)
    return int(value) if int in members else value


WITH_PARAMETERS = [
    (key, row, one)
    for key, row in CHOICES
    for one in row.parameters
    if one.name != "train_layers"  # it needs others beside it; tests/integration/test_refit.py
]


@pytest.mark.parametrize(("key", "row", "parameter"), WITH_PARAMETERS, ids=name_of)
def test_only_values_that_are_not_defaults_name_a_run(
    key: str, row: Row, parameter: Parameter
) -> None:
    plain = changed(base(key), {key: chosen(row)})
    always_named = f"{key}.{parameter.name}" == "backbone.resolution"
    if parameter.default is not REQUIRED and parameter.name not in NEEDED.get(row.name, {}):
        same = changed(plain, {f"{key}.{parameter.name}": parameter.default})
        assert run_name(same) == run_name(plain)
        named = f"{key}.{parameter.name}" in identity(plain)
        assert named == (always_named and parameter.default is not None)
    values = {f"{key}.{parameter.name}": another(parameter)}
    if parameter.name == "nesterov":
        values["train.optimizer.momentum"] = 0.9
    other = changed(plain, values)
    runtime = key == "engine" or (parameter.name == "root" and row.name != "folder")
    assert (run_name(other) == run_name(plain)) == runtime
    assert (identity(other) == identity(plain)) == runtime


def test_a_new_key_with_a_default_renames_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package had got another key since the run was named."""
    config = compose("fedavg_noniid", ["train.lr=0.3"])
    before = run_name(config)
    assert set(identity(config)) == {
        *("experiment", "augment.crop_padding", "augment.flip", "backbone.resolution"),
        *("train.lr", "train.optimizer.weight_decay", "train.schedule.warmup"),
        *("federated.clients", "partition.name", "evaluate.every"),
    }

    row = partitioner["classes"]
    newer_row = replace(row, parameters=(*row.parameters, Parameter("new", float, 0.5)))
    monkeypatch.setitem(partitioner.added, "classes", newer_row)
    newer = compose("fedavg_noniid", ["train.lr=0.3"])
    assert newer.partition.new == 0.5
    assert run_name(newer) == before
    assert run_name(changed(newer, {"partition.new": 0.6})) != before


# --- labels --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "label"),
    [
        ([], "FedAvg"),
        (["algorithm.aggregator=ties"], "TIES"),
        (["algorithm=fedprox"], "FedProx μ=0.01"),
        (["algorithm=scaffold"], "SCAFFOLD"),
        (["algorithm=ghbm"], "GHBM"),
        (["algorithm=ghbm", "algorithm.correction.tau=3", "algorithm.sampling=cyclic"],
         "GHBM, tau 3, cyclic client sampling"),
        (["algorithm=fedcm", "algorithm.correction.alpha=0.5", "algorithm.aggregator=median"],
         "FedCM + median, alpha 0.5"),
        (["algorithm=feddyn"], "FedDyn"),
        (["algorithm.average=exponential"],
         "FedAvg, evaluated by the exponential moving average, decay 0.9"),
        (["algorithm.average=last", "algorithm.average.rounds=5", "algorithm=fedavgm"],
         "FedAvgM, evaluated by the mean of the last models, rounds 5"),
        (["algorithm=fednova"], "FedNova"),
        (["algorithm=fedadam"], "FedAdam"),
        (["algorithm=fedyogi"], "FedYogi"),
        (["algorithm=fedavgm"], "FedAvgM"),
        (["algorithm=median"], "median"),
        (["algorithm=norm_clipping"], "norm clipping"),
        (["algorithm=cyclic"], "FedAvg, cyclic client sampling"),
        (["algorithm=cyclic_ties"], "TIES, cyclic client sampling"),
        (["algorithm=chain"], "FedAvg, chain of 10"),
        (["algorithm=chain", "algorithm.sampling.chains=2"], "FedAvg, 2 chains of 5"),
        (["algorithm=chain", "algorithm.sampling.order=opposite"],
         "FedAvg, 2 chains of 10 in opposite orders"),
        (["algorithm=chain", "federated.participation=1", "algorithm.carry_momentum=true"],
         "FedAvg, chain of 100, momentum carried along"),
        (["algorithm=chain", "algorithm.proximal=0.1", "algorithm.proximal_to=round"],
         "FedProx μ=0.1 towards the round's start, chain of 10"),
        (["algorithm.server.lr=2"], "FedAvg, server learning rate 2"),
        (["algorithm=cyclic", "algorithm.server.lr=2"],
         "FedAvg, server learning rate 2, cyclic client sampling"),
        (["algorithm=fedavgm", "algorithm.aggregator=median"], "FedAvgM + median"),
        (["algorithm=scaffold", "algorithm.proximal=0.1"], "SCAFFOLD + FedProx μ=0.1"),
        (["algorithm.aggregator=ties", "algorithm.aggregator.density=0.5"], "TIES, density 0.5"),
        (["privacy=central", "engine=flower_simulation"],
         "FedAvg, central differential privacy"),
        (["privacy=local", "engine=flower_simulation", "algorithm=fedadam"],
         "FedAdam, local differential privacy"),
    ],
)  # fmt: skip
def test_an_algorithm_is_called_by_what_it_does(overrides: list[str], label: str) -> None:
    config = compose("fedavg_noniid", overrides)
    assert labels(config)["algorithm"] == label
    assert labels(from_yaml(to_yaml(config), "its file")) == labels(config)


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["algorithm.aggregator=ties"], "_ties-J4_"),
        (["algorithm=fedprox"], "_fedprox-mu=0.01-J4_"),
        (["algorithm.server.lr=2"], "_fedavg-server-learning-rate-2-J4_"),
        (["algorithm=cyclic"], "_fedavg-cyclic-client-sampling-J4_"),
        (["algorithm=chain", "algorithm.sampling.chains=2"], "_fedavg-2-chains-of-5-J4_"),
        (["partition=dirichlet", "partition.alpha=0.1"], "_dirichlet-alpha=0.1_"),
        (["partition=classes", "partition.classes_per_client=5"], "_nc=5_"),
        (["partition=quantity"], "_log-normal-sizes-sigma=1_"),
    ],
)
def test_a_run_is_named_by_its_rows_in_plain_letters(overrides: list[str], word: str) -> None:
    name = run_name(compose("fedavg_noniid", overrides))
    assert word in name
    assert name.isascii()


def test_labels_of_other_rows() -> None:
    sparse = compose("sparse_fedavg", ["partition=classes", "partition.classes_per_client=5"])
    assert labels(sparse) == {
        "data": "CIFAR-100",
        "backbone": "dino_vits16",
        "head": "ridge head",
        "trainable": "full fine-tuning",
        "optimizer": "SGD",
        "mask_rule": "least sensitive",
        "partition": "Nc=5",
        "algorithm": "FedAvg",
    }
    central = labels(compose("head_only", ["train.optimizer=adamw"]))
    assert central == {
        "data": "CIFAR-100",
        "backbone": "dino_vits16",
        "head": "linear head",
        "trainable": "head only",
        "optimizer": "AdamW",
    }
    assert labels(compose("centralized", ["train.trainable=last_blocks:2"]))["trainable"] == (
        "last 2 blocks"
    )


def test_rows_of_a_config_are_plain_values() -> None:
    tree = asdict(compose("fedavg_noniid", ["algorithm=consensus"]))
    assert tree["partition"] == {"name": "classes", "classes_per_client": 10}
    assert tree["algorithm"]["aggregator"]["threshold"] is None
