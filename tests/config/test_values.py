"""Every key of every config, and every value that a person or a script may write by mistake."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest

from fedlens.config.compose import changed, compose, from_yaml, to_yaml
from fedlens.config.schema import ROW_KEYS, Config, keys, parameters, switches
from fedlens.errors import FedlensError
from fedlens.registry import LARGEST, MOST, REGISTRIES, Parameter, Pattern, Range

LONG = "x" * 5000
NASTY: list[Any] = [
    math.nan, math.inf, -math.inf, -1, -0.5, -1e308, 10**6, 10**30, -(10**30), 10**400, -(10**400),
    10**5000, 1e308, 1e39, 1e37, 5e-324, True, "", " ", "\x00", "a\nb", "\ud800", "ä😀", "-rf",
    "../up", "1", "nan", LONG, None, [], [1], {}, {"a": 1},
]  # fmt: skip
Found = list[tuple[str, str, Parameter]]


def every() -> Found:
    """The section, the row ("" of a plain key) and the parameter of all that a config may set."""
    plain = [(key.rpartition(".")[0], "", one) for key, one in parameters().items()]
    chosen = [
        (key, row.name, one)
        for key, kind in ROW_KEYS.items()
        for row in REGISTRIES[kind]
        if row.source.startswith("fedlens.")
        for one in row.parameters
    ]
    return plain + chosen


def members(one: Parameter) -> tuple[Any, ...]:
    """The types it may have; a choice of words has none."""
    if get_origin(one.type) is Literal:
        return ()
    return get_args(one.type) if get_origin(one.type) in (Union, UnionType) else (one.type,)


def of_type(*kinds: type) -> Found:
    return [entry for entry in every() if set(kinds) & set(members(entry[2]))]


def named(entry: tuple[str, str, Parameter]) -> str:
    where, row, one = entry
    return f"{where}={row}: {one.name}" if row else f"{where}.{one.name}"


def sentence(error: BaseException) -> str:
    """The message, which is one short sentence in one line."""
    text = str(error)
    assert text.isprintable(), repr(text)  # no line break either
    assert text.endswith((".", "?")), text
    assert len(text) < 2000, text
    return text


def allowed(one: Parameter, value: Any) -> bool:
    """The slow and obvious rule."""
    kinds = members(one)
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, int | float) and {int, float} & set(kinds):
        assert isinstance(one.range, Range)
        low, high = map(float, one.range.interval[1:-1].split(","))
        inside = low <= value <= high and abs(value) <= max(LARGEST, high if high < math.inf else 0)
        open_end = (value == low and one.range.interval[0] == "(") or (
            value == high and one.range.interval[-1] == ")"
        )
        small = float in kinds or abs(value) <= max(MOST, high if high < math.inf else 0)
        return inside and not open_end and small and (float in kinds or isinstance(value, int))
    if isinstance(value, str) and str in kinds:
        if isinstance(one.range, Pattern):
            return re.fullmatch(r"[\w=+][\w.=+-]*", value) is not None and len(value) <= 200
        return value in ("ä😀", "-rf", "../up", "1", "nan", one.default)
    return (value is None and type(None) in kinds) or (
        isinstance(value, list) and list[str] in kinds and all(type(one) is str for one in value)
    )


def test_every_number_has_a_range_and_every_key_is_known() -> None:
    for entry in of_type(int, float):
        assert isinstance(entry[2].range, Range), named(entry)
    assert {*parameters()} | {*ROW_KEYS} <= {*keys()}


def test_every_default_lies_in_its_range() -> None:
    for where, _, one in every():
        if one.default is not Parameter("", Any).default:
            one.checked(one.default, where)


@pytest.mark.parametrize("value", NASTY, ids=lambda value: ascii(type(value).__name__))
def test_every_key_takes_a_value_of_its_range_and_refuses_others_in_a_sentence(value: Any) -> None:
    for entry in every():
        where, _, one = entry
        try:
            taken = one.checked(value, where)
        except FedlensError as error:
            assert one.name in sentence(error)
            assert not allowed(one, value), named(entry)
        else:
            assert taken == (float(value) if type(taken) is float else value)
            assert allowed(one, value), named(entry)


def test_no_integer_is_too_large_for_a_tensor_and_no_number_is_not_one() -> None:
    for where, _, one in of_type(int, float):
        for value in (10**30, math.nan, math.inf, -math.inf):
            if value == 10**30 and float in members(one):
                continue
            with pytest.raises(FedlensError):
                one.checked(value, where)


@pytest.fixture(scope="module")
def config() -> Config:
    return compose("fedavg_iid", [])


def test_a_config_is_refused_in_a_sentence_whatever_a_key_is_set_to(config: Config) -> None:
    """Through all of it: types by OmegaConf, rows by the registry, then ranges."""
    for key in _plain_keys():
        for value in (math.nan, -math.inf, 10**400, "", "a\nb", LONG, [1], {"a": 1}):
            try:
                changed(config, {key: value})
            except FedlensError as error:
                sentence(error)
            else:
                raise AssertionError(f"{key}={value!r} was accepted")


def _plain_keys() -> Iterator[str]:
    """Those of numbers."""
    return (key for key, one in parameters().items() if set(members(one)) & {int, float})


def test_switches_and_lists_have_values_of_their_types(config: Config, tmp_path: Path) -> None:
    for key in switches():
        for value in (-1, 0, 1, 10**30, 0.5, math.nan):
            with pytest.raises(FedlensError, match=f"{key}=.* must be true or false"):
                changed(config, {key: value})
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [/experiment/centralized]\nevaluate:\n  test: 3\n")
    with pytest.raises(FedlensError, match=r"mine\.yaml: evaluate\.test=3 must be true or false"):
        compose(str(file), [])
    file.write_text("federated: {diagnostics: [[1]]}\n")
    with pytest.raises(FedlensError, match=r"federated\.diagnostics=\[\[1\]\] must be list"):
        compose(str(file), [])
    text = to_yaml(config).replace("test_curve: false", "test_curve: 3")
    with pytest.raises(FedlensError, match=r"evaluate\.test_curve=3 must be true or false"):
        from_yaml(text, "it")


def test_a_row_is_refused_in_a_sentence_whatever_its_parameters_are_set_to() -> None:
    for where, row, one in every():
        if not row or set(members(one)) & {str}:
            continue
        for value in (math.nan, -math.inf, "", "a\nb", LONG, [1], {"a": 1}):
            with pytest.raises(FedlensError) as caught:
                REGISTRIES[ROW_KEYS[where]].settings({"name": row, one.name: value}, where)
            sentence(caught.value)


@pytest.mark.parametrize("value", [None, [1], {}, {"name": 5}, {"name": None}, {5: 1}, 5, "", LONG])
def test_what_names_no_row_is_refused(config: Config, value: Any) -> None:
    for key in ROW_KEYS:
        if key == "backbone" and isinstance(value, int | str):  # it would ask timm, which is slow
            continue
        with pytest.raises(FedlensError) as caught:
            changed(config, {key: value})
        assert key in sentence(caught.value)


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("threads=1000000", r"threads=1000000 must be in \[1, 1024\]"),
        ("backbone.resolution=100000", r"backbone.resolution=100000 must be in \[1, 4096\]"),
        (f"run.name={'x' * 300}", "run.name=xxx.*… must be one plain folder name.* 200 bytes"),
        (f"run.name='{'ä' * 101}'", "200 bytes"),
        ("run.name=-rf", "run.name=-rf must be one plain folder name"),
        ("run.name=.hidden", "the first not . or -"),
        ("run.name=", "run.name= must be one plain folder name"),
        ("run.root=", "run.root= must be text that is not empty"),
        (f"run.root=/tmp/{'x' * 300}", "at most 255 bytes between two slashes"),
        ("data.root=''", "data.root= must be text that is not empty"),
        ("seed=1e3", "seed: Value '1000.0'"),
        ("train.epochs=10000000000", "train.epochs=10000000000 must be 0 or more, and at most"),
        ("train.prefix_cache_gb=1e300", r"must be in \[0, 1e6\]"),
        ("seed=" + "9" * 5000, "is not of the form key=value"),
        ("train.lr=" + "9" * 400, "train.lr"),
        ("train.lr=" + "[" * 3000, "is not of the form key=value"),
        ("train.lr=${train.lr}", "train.lr"),
        ("train.lr=${nothing}", "nothing"),
        ("federated.diagnostics=[1]", "federated.diagnostics=1 is unknown"),
        ("federated.diagnostics=drift", "federated.diagnostics"),
        ("evaluate.test=7", "evaluate.test=7 must be true or false"),
        ("train.compile=-1", "train.compile=-1 must be true or false"),
        ("train.schedule=${seed}", "train.schedule=0 must be a section"),
        ("checkpoint=${run.root}", "checkpoint=runs must be a section"),
        (f"checkpoint={LONG}", "checkpoint: .*…"),
        (f"experiment={LONG}", "The experiment comes first: .*…"),
    ],
)
def test_values_that_crashed_are_refused(override: str, complaint: str) -> None:
    with pytest.raises(FedlensError, match=complaint) as caught:
        compose("centralized", [override])
    sentence(caught.value)


@pytest.mark.parametrize("name", ["a", "run_1", "größe", "lr=0.1+b-2", "x" * 200])
def test_plain_names_are_names_of_runs(name: str) -> None:
    assert compose("centralized", [f"run.name='{name}'"]).run.name == name


def test_a_stored_config_is_checked_like_a_composed_one(config: Config) -> None:
    text = to_yaml(config)
    assert from_yaml(text, "it") == config
    for old, new in [("seed: 0", "seed: -1"), ("threads: null", "threads: 1000000")]:
        assert old in text
        with pytest.raises(FedlensError, match="it is not a config of this version") as caught:
            from_yaml(text.replace(old, new), "it")
        sentence(caught.value)
