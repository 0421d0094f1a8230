"""From words on a command line to a checked `Config`: Hydra composes, we refuse in one sentence."""

import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedlens.errors import FedlensError, suggest
from fedlens.experiments.config import CIRCUMSTANCES, Config, keys
from fedlens.experiments.validate import validate

CONFIGS = "fedlens.configs"
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


def header(text: str) -> str:
    """What the comments at the head of a YAML file say."""
    lines = [line for line in text.splitlines() if line.startswith("#") and "@package" not in line]
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)


def groups() -> list[str]:
    """The folders one option is chosen from; a suite is not part of a config."""
    return sorted(
        entry.name
        for entry in files(CONFIGS).iterdir()
        if entry.is_dir() and not entry.name.startswith("_") and entry.name != "suite"
    )


def options(group: str) -> list[str]:
    folder = files(CONFIGS).joinpath(group)
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )


def compose(experiment: str, overrides: list[str]) -> Config:
    """The config of `experiment` with `key=value` overrides, checked."""
    if experiment not in options("experiment"):
        raise FedlensError(
            f"Unknown experiment '{experiment}': {suggest(experiment, options('experiment'))}"
        )
    checked = [part for override in overrides for part in _checked(override)]
    ConfigStore.instance().store(name="schema", node=Config)
    try:
        with initialize_config_module(CONFIGS, version_base="1.3"):
            composed = hydra_compose("config", overrides=[f"+experiment={experiment}", *checked])
        return _finished(composed)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise FedlensError(_in_one_sentence(error)) from error


def load(path: Path) -> Config:
    """A run's own config.yaml, held to the same schema."""
    try:
        content = OmegaConf.load(path)
        if not isinstance(content, DictConfig) or "experiment" not in content:
            raise ValueError("it names no experiment.")
        stored = OmegaConf.merge(OmegaConf.structured(Config), content)
        assert isinstance(stored, DictConfig)
        return _finished(stored)
    except OSError as error:
        raise FedlensError(f"{path} cannot be read: {error.strerror}.") from error
    except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise FedlensError(
            f"{path} is not a config of this version: {_in_one_sentence(error)}"
        ) from error


def amend(config: Config, overrides: list[str]) -> Config:
    """A stored config under other circumstances (device, data.root, …): not another experiment."""
    for override in overrides:
        key = override.partition("=")[0]
        if not any(key == allowed or key.startswith(f"{allowed}.") for allowed in MOVABLE):
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
    told = f"{error.__cause__ or error}"
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key")), "")
    said = [line for line in lines if not line.startswith(("full_key", "reference", "object"))]
    return f"{key}: {said[0]}." if key else " ".join(said)
