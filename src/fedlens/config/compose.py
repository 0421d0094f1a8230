"""From words on a command line to a checked `Config`, and back: Hydra composes, we refuse in one
sentence.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
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

from fedlens.config.checks import validate
from fedlens.config.options import CONFIGS, groups, header, options
from fedlens.config.schema import CIRCUMSTANCES, Config, keys
from fedlens.errors import FedlensError, suggest

FROM_FILE = "from_file"  # what Hydra calls an experiment that is somebody's own file
MOVABLE = (*(key for key in CIRCUMSTANCES if key != "run"), "backbone.weights")


@dataclass(frozen=True)
class Experiment:
    """An experiment file as its header documents it."""

    name: str
    documentation: str


def experiments() -> list[Experiment]:
    found = []
    for name in options("experiment"):
        text = files(CONFIGS).joinpath("experiment", f"{name}.yaml").read_text(encoding="utf-8")
        found.append(Experiment(name, header(text)))
    return found


def documentation(experiment: str) -> str:
    """What the header of an experiment says, be it one of ours or a file."""
    if _is_file(experiment):
        return header(_text(Path(experiment)))
    return next(entry.documentation for entry in experiments() if entry.name == experiment)


def compose(experiment: str, overrides: list[str]) -> Config:
    """The config of `experiment` with `key=value` overrides, checked.

    An experiment is one of ours by name, or anybody's by the path of its YAML file.
    """
    checked = [part for override in overrides for part in _checked(override)]
    if _is_file(experiment):
        return _from_file(Path(experiment), checked)
    if experiment not in options("experiment"):
        raise FedlensError(
            f"Unknown experiment '{experiment}' (nor a .yaml file): "
            f"{suggest(experiment, options('experiment'))}"
        )
    return _composed([f"+experiment={experiment}", *checked])


def command(config: Config) -> list[str]:
    """The words that give this config again, wherever and however they are run."""
    told = (f"{key}={word(value)}" for key, value in differences(config).items())
    return ["fedlens", "run", config.experiment, *told]


def differences(config: Config) -> dict[str, Any]:
    """What a config says beyond its experiment, key by key; circumstances are left out."""
    plain = _plain(config.experiment)
    return {
        key: value
        for key, value in _leaves(asdict(config))
        if value != plain[key] and not _within(key, CIRCUMSTANCES)
    }


def word(value: object) -> str:
    """A value as it is written behind the equals sign."""
    if isinstance(value, str):
        try:
            read = OverridesParser.create().parse_override(f"key={value}").value()
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
    try:
        other = OmegaConf.structured(config)
        for key, value in values.items():
            OmegaConf.update(other, key, value)
        return _finished(other)
    except OmegaConfBaseException as error:
        raise FedlensError(_in_one_sentence(error)) from error


def _quoted(text: str) -> str:
    return QuotedString(text, Quote.single).with_quotes()


@cache
def _plain(experiment: str) -> dict[str, Any]:
    return dict(_leaves(asdict(compose(experiment, []))))


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("train.lr", 0.1) and so on."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _within(key: str, others: tuple[str, ...]) -> bool:
    return any(key == other or key.startswith(f"{other}.") for other in others)


def _is_file(experiment: str) -> bool:
    return experiment.endswith((".yaml", ".yml"))


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
        told = yaml.safe_load(text)
    except OSError as error:
        raise FedlensError(f"{path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        raise FedlensError(f"{path} is not a YAML file{line}.") from error
    if not isinstance(told, dict):
        raise FedlensError(
            f"{path} is not an experiment: it says nothing of the form `key: value`."
        )
    return text


def _from_file(path: Path, overrides: list[str]) -> Config:
    """Hydra reads experiments from folders it knows, so it is shown a copy in one."""
    text = _text(path)
    if "@package" not in text:
        text = f"# @package _global_\n{text}"
    with TemporaryDirectory() as folder:
        copy = Path(folder, "experiment", f"{FROM_FILE}.yaml")
        copy.parent.mkdir()
        copy.write_text(text, encoding="utf-8")
        place = _quoted(f"file://{folder}")
        try:
            config = _composed(
                [f"hydra.searchpath=[{place}]", f"+experiment={FROM_FILE}", *overrides]
            )
        except FedlensError as error:
            raise FedlensError(f"{path}: {error}") from error
    if config.experiment not in options("experiment"):
        raise FedlensError(
            f"{path}: experiment={config.experiment} is none of ours: leave that key out, and say "
            "what it is based on, such as `defaults: [/experiment/centralized]`."
        )
    return config


def _composed(overrides: list[str]) -> Config:
    ConfigStore.instance().store(name="schema", node=Config)
    try:
        with initialize_config_module(CONFIGS, version_base="1.3"):
            composed = hydra_compose("config", overrides=overrides)
        return _finished(composed)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise FedlensError(_in_one_sentence(error)) from error


def load(path: Path) -> Config:
    """A run's own config.yaml, held to the same schema."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")  # what is no text is no config
    except OSError as error:
        raise FedlensError(f"{path} cannot be read: {error.strerror}.") from error
    return from_yaml(text, str(path))


def from_yaml(text: str, source: str) -> Config:
    """The inverse of `to_yaml`; `source` is where the text is from, for complaints."""
    try:
        content = OmegaConf.create(text)
        if not isinstance(content, DictConfig) or "experiment" not in content:
            raise ValueError("it names no experiment.")
        stored = OmegaConf.merge(OmegaConf.structured(Config), content)
        assert isinstance(stored, DictConfig)
        return _finished(stored)
    except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise FedlensError(
            f"{source} is not a config of this version: {_in_one_sentence(error)}"
        ) from error


def amend(config: Config, overrides: list[str]) -> Config:
    """A stored config under other circumstances (device, data.root, …): not another experiment."""
    for override in overrides:
        key = override.partition("=")[0]
        if not _within(key, MOVABLE):
            raise FedlensError(
                f"'{override}' cannot be changed in a run that has begun (only "
                f"{', '.join(MOVABLE)}): use `fedlens run` for another run."
            )
    checked = [part for override in overrides for part in _checked(override)]
    changes = [re.sub("^(tracker|engine)=", r"\1.name=", part) for part in checked]
    try:
        merged = OmegaConf.merge(OmegaConf.structured(config), OmegaConf.from_dotlist(changes))
        assert isinstance(merged, DictConfig)
        return _finished(merged)
    except OmegaConfBaseException as error:
        raise FedlensError(_in_one_sentence(error)) from error


def to_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _finished(composed: DictConfig) -> Config:
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    validate(config)
    return config


def _checked(override: str) -> list[str]:
    """The override, if its key is one of ours; `backbone=timm:NAME` becomes two."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException as error:
        raise FedlensError(
            f"'{override}' is not of the form key=value, such as train.lr=0.01."
        ) from error
    key = parsed.key_or_group
    if parsed.is_sweep_override():
        raise FedlensError(f"'{override}' names several values: a run has one value per key.")
    if parsed.type != OverrideType.CHANGE:
        raise FedlensError(f"'{override}': keys are fixed, so write {key}=value.")
    if key == "experiment":
        raise FedlensError(f"The experiment is the first word: fedlens run {parsed.value()}.")
    if key not in (known := [*keys(), *groups()]):
        raise FedlensError(f"Unknown config key '{key}': {suggest(key, known)}")
    if key not in groups():
        return [override]
    choice = str(parsed.value())
    if key == "backbone" and choice.startswith("timm:"):
        return ["backbone=timm", f"backbone.name={choice}"]
    if key == "backbone" and choice == "timm":
        raise FedlensError("backbone=timm needs a name: write backbone=timm:vit_base_patch16_224.")
    if choice not in options(key):
        raise FedlensError(f"{key}={choice} is unknown: {suggest(choice, options(key))}")
    return [override]


def _in_one_sentence(error: Exception) -> str:
    """What OmegaConf and Hydra say over several lines: the key, then the complaint."""
    told = f"{error.__cause__ or error}".partition("Config search path:")[0]
    told = re.sub(rf"^In '(experiment/{FROM_FILE}|config)': (\w+ raised while .*)?", "", told)
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key")), "")
    said = [line for line in lines if not line.startswith(("full_key", "reference", "object"))]
    return f"{key}: {said[0]}." if key else " ".join(said)
