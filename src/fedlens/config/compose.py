"""From a command line to a checked `Config` and back: Hydra composes presets, rows check theirs.

`key=value` sets a key. On a key that names a row (see `schema.ROW_KEYS`), `key=name` chooses the
row and `key.parameter=value` sets one of its parameters.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedlens import plugins, yaml_reader
from fedlens.config.checks import check
from fedlens.config.options import PRESETS, groups, header, options
from fedlens.config.schema import (
    ROW_KEYS,
    RUNTIME_KEYS,
    Config,
    keys,
    row_key,
    sections,
    switches,
)
from fedlens.errors import FedlensError, shown, suggest
from fedlens.plugins import Plugin, PluginError
from fedlens.registry import REGISTRIES, Row, diagnostic, load_plugin

DIAGNOSTICS = "federated.diagnostics"  # names rows too, but as a list
FROM_FILE = "from_file"  # Hydra's name for an experiment that is a file of the user's
REFUSALS = (
    HydraException,
    OmegaConfBaseException,
    ValueError,
    OverflowError,  # a number that no float holds
    RecursionError,  # an interpolation, or an experiment's defaults, that contain themselves
)
MOVABLE = (*(key for key in RUNTIME_KEYS if key != "run"), "backbone.weights", "partition.file")


@dataclass(frozen=True)
class ExperimentPreset:
    """An experiment file as its header documents it."""

    name: str
    documentation: str


@dataclass(frozen=True)
class Override:
    """One `key=value` of a command line, parsed."""

    key: str
    value: Any


def experiments() -> list[ExperimentPreset]:
    presets = []
    for name in options("experiment"):
        text = files(PRESETS).joinpath("experiment", f"{name}.yaml").read_text(encoding="utf-8")
        presets.append(ExperimentPreset(name, header(text)))
    return presets


def documentation(experiment: str) -> str:
    """The header of an experiment, a preset's or a file's."""
    if _is_file(experiment):
        return header(_text(Path(experiment)))
    return next(preset.documentation for preset in experiments() if preset.name == experiment)


def compose(experiment: str, overrides: list[str]) -> Config:
    """The config of `experiment` with `key=value` overrides, checked.

    `experiment` is the name of a preset or the path of a YAML file.
    """
    parsed = [one for override in overrides for one in _parsed(override)]
    if _is_file(experiment):
        return _from_file(Path(experiment), parsed)
    if experiment not in options("experiment"):
        raise FedlensError(
            f"'{experiment}' is not a known experiment, nor a .yaml file: "
            f"{suggest(experiment, options('experiment'))}"
        )
    return _with(deepcopy(_preset(experiment, *_presets_chosen(parsed))), parsed)


def parse(words: list[str]) -> list[tuple[str, Any]]:
    """The keys and values of `key=value` words."""
    return [(one.key, one.value) for word in words for one in _parsed(word)]


def command(config: Config) -> list[str]:
    """The command line that gives this config again, without its runtime keys."""
    words = (f"{key}={word(value)}" for key, value in differences(config).items())
    return ["fedlens", "run", config.experiment, *words, *plugin_options(config)]


def plugin_options(config: Config) -> list[str]:
    """The options that load the plugins of the config's rows."""
    return plugins.options(plugins_of(config).values())


def plugins_of(config: Config) -> dict[str, Plugin]:
    """The plugins that the config's rows come from, by their keys; diagnostics by their names."""
    rows = {key: row_of(config, key) for key in ROW_KEYS}
    rows |= {f"{DIAGNOSTICS}.{name}": diagnostic[name] for name in config.federated.diagnostics}
    return {key: row.plugin for key, row in rows.items() if row.plugin is not None}


def differences(config: Config) -> dict[str, Any]:
    """What a config sets beyond its experiment, key by key; runtime keys are left out.

    A row is named by its own key, and of its parameters those follow that are not its defaults.
    """
    preset = _preset_values(config.experiment)
    defaults = {
        f"{key}.{name}": value
        for key in ROW_KEYS
        for name, value in row_of(config, key).defaults.items()
    }
    # A folder of the user's own is what the run is about, wherever it lies.
    folder = "data.root" if "root" in row_of(config, "data").traits.get("paths", ()) else None
    found: dict[str, Any] = {}
    for key, value in leaves(asdict(config)):
        row = row_key(key)
        rechosen = row is not None and row in found
        runtime = within(key, RUNTIME_KEYS) and key != folder
        if runtime or value == (defaults if rechosen else preset).get(key, ...):
            continue
        if row and key == f"{row}.plugin":  # the row knows it
            continue
        found[row if row and key == f"{row}.name" else key] = value
    return found


def word(value: object) -> str:
    """A value as it is written behind the equals sign."""
    if isinstance(value, str):
        try:
            read = _parser().parse_override(f"key={value}").value()
        except HydraException:
            read = None
        return value if type(read) is str and read == value else _quoted(value)
    if isinstance(value, list):
        return f"[{','.join(map(word, value))}]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return repr(value)


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with other values of some keys, checked."""
    if any(key not in ROW_KEYS and is_dataclass(_at_or_none(config, key)) for key in values):
        # A whole section: OmegaConf merges it.
        return _with(_editable(config), [Override(*item) for item in values.items()])
    made, typed = deepcopy(config), _typed()
    _check_switches(values)
    try:
        for key, value in values.items():
            if key in ROW_KEYS:
                before = dict(getattr_dotted(made, key))
                _set(made, key, _row_choice(key, before, _plain(value)))
        for key, value in values.items():
            if key in ROW_KEYS:
                continue
            if (row := row_key(key)) is not None:
                settings = {**getattr_dotted(made, row), key.removeprefix(f"{row}."): _plain(value)}
                _set(made, row, settings)
            else:
                OmegaConf.update(typed, key, _plain(value), merge=False)
                _set(made, key, _content(OmegaConf.select(typed, key)))
        return _completed(made)
    except REFUSALS as error:
        raise FedlensError(_in_one_sentence(error)) from error


def load(path: Path) -> Config:
    """A run's own config.yaml."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")  # a binary file is no config
    except OSError as error:
        raise FedlensError(f"{path} cannot be read: {error.strerror}.") from error
    _load_copies(text, path)
    return from_yaml(text, str(path))


def _load_copies(text: str, path: Path) -> None:
    """Loads the run's own copies of plugins whose rows nothing that is loaded has."""
    folder = path.parent
    try:
        content = yaml_reader.parse(text, str(path))
        chosen = {key: _at(content, key) for key in ROW_KEYS}
        measured = _at(content, DIAGNOSTICS) or []
    except (FedlensError, TypeError, AttributeError):
        return  # `from_yaml` says what is wrong with it
    for key, settings in chosen.items():
        made_with = settings.get("plugin") if isinstance(settings, dict) else None
        if made_with and settings.get("name") not in REGISTRIES[ROW_KEYS[key]]:
            plugins.load_copy(folder, str(made_with))
    if any(name not in diagnostic for name in measured):
        plugins.load_copies(folder)


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if tree else None
    return tree


def from_yaml(text: str, source: str) -> Config:
    """The inverse of `to_yaml`; `source` says in errors where the text is from."""
    return _read(text, source)


def from_plain(values: Mapping[str, Any], source: str) -> Config:
    """The config of these values, which must not contain interpolations; defaults for the rest."""
    if interpolated := [key for key, value in leaves(values) if "${" in str(value)]:
        raise FedlensError(f"{source} has an interpolation in {interpolated[0]}: write its value.")
    return _read(dict(values), source)


def _read(given: str | dict[str, Any], source: str) -> Config:
    try:
        named = yaml_reader.parse(given, "its text") if isinstance(given, str) else given
        if not isinstance(named, dict) or "experiment" not in named:
            raise ValueError("it names no experiment.")
        _check_switches(named)
        content = OmegaConf.create(given)
        stored = OmegaConf.merge(_schema(), content)
        assert isinstance(stored, DictConfig)
        return _finished(stored)
    except PluginError:
        raise
    except (*REFUSALS, yaml.YAMLError, FedlensError) as error:
        raise FedlensError(
            f"{source} is not a config of this version: {_in_one_sentence(error)}"
        ) from error


def to_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(_plain(asdict(config))))


def amend(config: Config, overrides: list[str]) -> Config:
    """A stored config with other runtime keys (device, data.root, …): the same experiment."""
    for override in overrides:
        if not within(override.partition("=")[0], MOVABLE):
            raise FedlensError(
                f"'{override}' cannot be changed in a run that has begun (only "
                f"{', '.join(MOVABLE)}): use `fedlens run` for another run."
            )
    parsed = [one for override in overrides for one in _parsed(override)]
    return _with(_editable(config), parsed)


def _editable(config: Config) -> DictConfig:
    """The config as OmegaConf knows it, with its schema."""
    content = OmegaConf.create(_plain(asdict(config)))
    editable = OmegaConf.merge(_schema(), content)
    assert isinstance(editable, DictConfig)
    return editable


@cache
def _schema() -> DictConfig:
    """Merging copies it."""
    schema = OmegaConf.structured(Config)
    assert isinstance(schema, DictConfig)
    return schema


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("train.lr", 0.1) and so on."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def within(key: str, others: Iterable[str]) -> bool:
    """Whether the key is one of the others, or lies below one."""
    return any(key == other or key.startswith(f"{other}.") for other in others)


@cache
def _preset_values(experiment: str) -> dict[str, Any]:
    return dict(leaves(asdict(compose(experiment, []))))


def row_of(config: Config, key: str) -> Row:
    """The registry's row that a config chooses by `key`."""
    return REGISTRIES[ROW_KEYS[key]][getattr_dotted(config, key)["name"]]


def getattr_dotted(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _at_or_none(config: Config, key: str) -> Any:
    try:
        return getattr_dotted(config, key)
    except AttributeError:
        return None


def _set(config: Config, key: str, value: Any) -> None:
    path, _, last = key.rpartition(".")
    setattr(getattr_dotted(config, path) if path else config, last, value)


@cache
def _typed() -> DictConfig:
    """The schema, to convert single values to the types of their keys and to refuse others.

    Making it takes longer than all else that `changed` does, so there is one.
    """
    schema = OmegaConf.structured(Config)
    assert isinstance(schema, DictConfig)
    return schema


def _content(value: Any) -> Any:
    return OmegaConf.to_object(value) if OmegaConf.is_config(value) else value


def _quoted(text: str) -> str:
    return QuotedString(text, Quote.single).with_quotes()


def _is_file(experiment: str) -> bool:
    return experiment.endswith((".yaml", ".yml"))


def _text(path: Path) -> str:
    text = yaml_reader.read_text(path)
    content = yaml_reader.parse(text, str(path))
    if not isinstance(content, dict):
        raise FedlensError(f"{path} is not an experiment: it has no line `key: value`.")
    if any(not isinstance(key, str) for key in content):
        raise FedlensError(f"{path}: keys must be words, as in `fedlens config centralized`.")
    _check_defaults(content.get("defaults", []), path)
    try:
        _check_switches(content)
    except FedlensError as error:
        raise FedlensError(f"{path}: {error}") from error
    return text


def _check_defaults(defaults: Any, path: Path) -> None:
    """Refuses what is not a list of presets: Hydra would fail on some of it without a sentence."""
    if not isinstance(defaults, list) or not all(map(_is_default, defaults)):
        raise FedlensError(
            f"{path}: defaults must be a list of presets, such as [/experiment/centralized] or "
            "[override /train: head]."
        )


def _is_default(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return isinstance(entry, str)
    lists = [value if isinstance(value, list) else [value] for value in entry.values()]
    words = [*entry, *(word for one in lists for word in one)]
    return len(entry) == 1 and all(isinstance(word, str | None) for word in words)


def _without_plugins(text: str, path: Path) -> str:
    """Loads the files that an experiment names as `plugins`; paths are relative to its own."""
    tree = yaml.compose(text)
    assert isinstance(tree, yaml.MappingNode)
    for name, value in tree.value:
        if name.value == "plugins":
            names = yaml_reader.parse(text, str(path))["plugins"]
            load_plugins(names, path.parent, str(path))
            return text[: name.start_mark.index] + text[value.end_mark.index :]
    return text


def load_plugins(names: Any, folder: Path, where: str) -> None:
    """Loads the plugins that a YAML file lists; `where` begins the error message."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FedlensError(f"{where}: plugins must be a list of files, such as [mine.py].")
    for name in names:
        load_plugin(folder / name)


def _from_file(path: Path, overrides: list[Override]) -> Config:
    """Hydra reads experiments from the folders it knows: the file is copied into one."""
    text = _without_plugins(_text(path), path)
    if "@package" not in text:
        text = f"# @package _global_\n{text}"
    with TemporaryDirectory() as folder:
        copy = Path(folder, "experiment", f"{FROM_FILE}.yaml")
        copy.parent.mkdir()
        copy.write_text(text, encoding="utf-8")
        place = _quoted(f"file://{folder}")
        try:
            words = [f"hydra.searchpath=[{place}]", f"+experiment={FROM_FILE}"]
            config = _with(_composed(*words, *_presets_chosen(overrides)), overrides)
        except FedlensError as error:
            raise FedlensError(f"{path}: {error}") from error
    if config.experiment not in options("experiment"):
        raise FedlensError(
            f"{path}: experiment={config.experiment} is not a known experiment: leave that key "
            "out, and name what it is based on, such as `defaults: [/experiment/centralized]`."
        )
    return config


def _presets_chosen(overrides: list[Override]) -> list[str]:
    """What chooses among preset files, which is for Hydra to do."""
    return [f"{one.key}={one.value}" for one in overrides if one.key in groups()]


@cache
def _preset(experiment: str, *chosen: str) -> DictConfig:
    """What Hydra gives, whose files do not change while this process lives: copy it to edit it."""
    return _composed(f"+experiment={experiment}", *chosen)


def _composed(*words: str) -> DictConfig:
    ConfigStore.instance().store(name="schema", node=_schema())
    try:
        with initialize_config_module(PRESETS, version_base="1.3"):
            return hydra_compose("config", overrides=list(words))
    except REFUSALS as error:
        raise FedlensError(_in_one_sentence(error)) from error


def _with(config: DictConfig, overrides: list[Override]) -> Config:
    """Rows are chosen first, then all other values are set, in the order given."""
    overrides = [one for one in overrides if one.key not in groups()]  # Hydra has seen to those
    _check_switches({one.key: one.value for one in overrides})
    try:
        for one in overrides:
            if one.key in ROW_KEYS:
                _choose_row(config, one.key, one.value)
        for one in overrides:
            if one.key in ROW_KEYS:
                continue
            if (key := row_key(one.key)) is not None:
                values = _row_values(config, key)
                values[one.key.removeprefix(f"{key}.")] = one.value
                OmegaConf.update(config, key, values, merge=False)
            else:
                OmegaConf.update(config, one.key, one.value, merge=False)
        return _finished(config)
    except REFUSALS as error:
        raise FedlensError(_in_one_sentence(error)) from error


def _choose_row(config: DictConfig, key: str, choice: Any) -> None:
    before = _row_values(config, key)
    OmegaConf.update(config, key, _row_choice(key, before, choice), merge=False)


def _row_choice(key: str, before: dict[str, Any], choice: Any) -> dict[str, Any]:
    """The values of the row that is chosen by `key` after another.

    Parameters that all rows of the kind have are kept if they were set; others are dropped.
    """
    registry = REGISTRIES[ROW_KEYS[key]]
    if isinstance(choice, dict):
        return choice
    if choice is None or isinstance(choice, list):
        raise FedlensError(f"{key}={word(choice)} has no `name`: write {key}=NAME.")
    chosen = registry.chosen(str(choice))
    if before.get("name") == choice:
        return before
    common = {one.name for one in registry.common}
    former = before.get("name", "")
    defaults = registry[former].defaults if former in registry else {}
    kept = {
        name: value
        for name, value in before.items()
        if name in common and value != defaults.get(name)
    }
    return {**kept, **chosen}


def _row_values(config: DictConfig, key: str) -> dict[str, Any]:
    value = OmegaConf.select(config, key)
    if isinstance(value, DictConfig):
        content = OmegaConf.to_container(value, resolve=True)
        assert isinstance(content, dict)
        return {str(name): one for name, one in content.items()}
    return {} if value is None else REGISTRIES[ROW_KEYS[key]].chosen(str(value))


def _finished(composed: DictConfig) -> Config:
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    for key, kind in sections().items():  # an interpolation may have put anything in its place
        if not isinstance(section := getattr_dotted(config, key), kind):
            raise FedlensError(f"{key}={shown(section)} must be a section with keys of its own.")
    return _completed(config)


def _check_switches(values: Mapping[str, Any]) -> None:
    """Refuses a number for what is on or off: OmegaConf takes any but 0 for true."""
    for key, value in leaves(values):
        if isinstance(value, int | float) and not isinstance(value, bool) and key in switches():
            raise FedlensError(f"{key}={shown(value)} must be true or false.")


def _completed(config: Config) -> Config:
    """Rows are completed and checked, in place, then the keys against each other."""
    for key, kind in ROW_KEYS.items():
        _set(config, key, REGISTRIES[kind].settings(getattr_dotted(config, key), key))
    if config.backbone.pretrained is None:
        config.backbone = config.backbone.but(pretrained=config.backbone.weights is not None)
    check(config)
    return config


@cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def _parsed(override: str) -> list[Override]:
    """The override, if its key is known; `tracker=NAME` sets `tracker.name`."""
    try:
        parsed = _parser().parse_override(override)
    except REFUSALS as error:
        raise FedlensError(
            f"'{shown(override)}' is not of the form key=value, such as train.lr=0.01."
        ) from error
    key, value = parsed.key_or_group, _plain(parsed.value())
    if parsed.is_sweep_override():
        raise FedlensError(
            f"'{shown(override)}' names several values: a run has one value per key."
        )
    if parsed.type != OverrideType.CHANGE:
        raise FedlensError(f"'{shown(override)}': keys are fixed, so write {key}=value.")
    if key == "experiment":
        raise FedlensError(f"The experiment comes first: fedlens run {shown(value)}.")
    if key not in (known := {*keys(), *groups()}) and not _maybe_of_row(key):
        raise FedlensError(f"Unknown config key '{key}': {suggest(key, known)}")
    if key in ("tracker", "privacy"):
        return [Override(f"{key}.name", value)]
    if key not in groups():
        return [Override(key, value)]
    choice = str(value)
    if choice not in options(key):
        raise FedlensError(f"{key}={shown(choice)} is unknown: {suggest(choice, options(key))}")
    return [Override(key, choice)]


def _maybe_of_row(key: str) -> bool:
    """A parameter of a row; whether the chosen row has it is for the row to say."""
    row = row_key(key)
    return row is not None and key.count(".") == row.count(".") + 1


def _plain(value: Any) -> Any:
    """A value of built-in types only, without Hydra's and our own."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(one) for key, one in value.items()}
    return value


def _in_one_sentence(error: Exception) -> str:
    """The several lines of OmegaConf and Hydra as one: the key, then what is wrong."""
    if isinstance(error, RecursionError):
        return "it refers to itself, or is nested too deeply: write the value itself."
    text = f"{error.__cause__ or error}".partition("Config search path:")[0]
    text = re.sub(rf"^In '(experiment/{FROM_FILE}|config)': (\w+ raised while .*)?", "", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key")), "")
    rest = [line for line in lines if not line.startswith(("full_key", "reference", "object"))]
    words = re.sub(r"'([^']{81,})'", lambda found: f"'{shown(found[1])}'", " ".join(rest))
    words = re.sub(r"[^\s'/]{161,}", lambda found: shown(found[0]), words)
    return f"{key}: {words}." if key else words
