"""A model as three files that others can use: model.safetensors, config.json and README.md.

config.json has the keys of timm's hub, and under `fedlens` how the model is built again. Reading a
folder runs no code of it.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from fedlens import params
from fedlens.data.transforms import Pipeline
from fedlens.errors import FedlensError
from fedlens.files import TEMPORARY, clear_partials, read_json, replacing, sha256, write_json
from fedlens.models import heads
from fedlens.models.architectures import backbones
from fedlens.models.architectures.backbones import Channels
from fedlens.models.architectures.module_features import with_features
from fedlens.models.classifier import Classifier
from fedlens.models.deep_features import Reading, deepen
from fedlens.params import Params
from fedlens.paths import expanded

TENSORS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
SCHEMA = 1

T = TypeVar("T")


class ExportedModel(Classifier):
    """A backbone and a linear head, from normalised images [B, 3, R, R] to logits [B, C].

    `preprocess` maps uint8 images [B, 3, H, W] of any size to the model's inputs, `classes` are the
    names of the C classes, and `config` is the content of config.json.
    """

    def __init__(
        self, backbone: nn.Module, head: nn.Linear, preprocess: Pipeline, config: dict[str, Any]
    ) -> None:
        super().__init__(backbone, head)
        self.preprocess = preprocess
        self.classes = tuple(str(name) for name in config["label_names"])
        self.config = config


def load_model(
    path: str | Path, *, backbone: Callable[[], nn.Module] | None = None
) -> ExportedModel:
    """Loads a model that `fedlens export` wrote.

    Args:
        path: The folder with model.safetensors and config.json.
        backbone: A function that returns the backbone, for a model whose backbone is neither of
            timm nor of this package. The folder says how it was called; no code is imported by
            that name.

    Returns:
        An `nn.Module` in evaluation mode, on the CPU. It maps normalised images to logits:
        `model(model.preprocess(pixels))` for uint8 pixels [B, 3, H, W]. `model.classes` has the
        names of the classes, and `model.config` the content of config.json.

    Raises:
        FedlensError: The folder is not an exported model, is damaged, or needs `backbone`.

    Examples:
        >>> import fedlens as fl
        >>> try:
        ...     fl.load_model("no/such/folder")
        ... except fl.FedlensError as error:
        ...     print(error)
        no/such/folder is not an exported model: it has no config.json.
    """
    folder = expanded(path)
    config = _read_config(folder)
    about = _value(config, "fedlens", dict, folder)
    if (schema := about.get("schema")) != SCHEMA:
        raise FedlensError(
            f"{folder} has schema {schema}, not {SCHEMA}: load it with fedlens "
            f"{about.get('version')}."
        )
    tensors = _read_tensors(folder / TENSORS, _value(about, "sha256", str, folder))
    name = _value(about, "backbone", str, folder)
    resolution = _value(about, "resolution", int, folder)
    cfg = _value(config, "pretrained_cfg", dict, folder)
    pipeline = Pipeline(resolution, _channels(cfg, "mean", folder), _channels(cfg, "std", folder))
    weight, bias, rest = _split(config, tensors, folder)
    head = heads.linear(weight.shape[1], len(weight), seed=0)
    module = _build(folder, about, name, resolution, backbone)
    deepen(module, _reading(about, folder), resolution=resolution)
    model = ExportedModel(module, head, pipeline, config)
    state = {f"backbone.{key}": value for key, value in rest.items()}
    state |= {"head.weight": weight, "head.bias": bias}
    if fault := params.mismatch(model.state_dict(), state):
        fault = fault.replace("backbone.", "")
        raise FedlensError(f"{folder / TENSORS} does not fit the backbone {name}: {fault}.")
    model.load_state_dict(state)
    return model.eval()


def _reading(about: Mapping[str, Any], folder: Path) -> Reading:
    """What the head reads of the backbone; a folder that does not say has a head on its output."""
    content = about.get("reading", {})
    fields = {"layers": int, "tokens": str, "random_features": int | None, "seed": int}
    fits = isinstance(content, dict) and all(
        key in fields and isinstance(value, fields[key]) for key, value in content.items()
    )
    if not fits:
        raise FedlensError(f"{folder / CONFIG} is damaged: fedlens.reading={content}.")
    return Reading(**content)


def check_target(folder: Path, run: str) -> None:
    """Refuses a folder that has anything but an earlier export of the same run."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FedlensError(f"{folder} is a file: name a folder for the model.")
    content = {path.name for path in folder.iterdir() if not path.name.startswith(TEMPORARY)}
    if not content:
        return
    if content <= {TENSORS, CONFIG, CARD} and CONFIG in content:
        before = read_json(folder / CONFIG)
        about = before.get("fedlens") if isinstance(before, dict) else None
        if isinstance(about, dict) and about.get("run") == run:
            return
    raise FedlensError(
        f"{folder} has other content, such as {min(content)}: name a new folder, or an empty one."
    )


def write(folder: Path, tensors: Params, config: Mapping[str, Any], card: str) -> None:
    """Writes the three files at once: after a kill, the folder is as before or complete."""
    folder = Path(os.path.realpath(folder))  # as `resolve`, which fails on links in a circle
    check_target(folder, config["fedlens"]["run"])
    clear_partials(folder.parent, of=folder.name)
    with replacing(folder) as temporary:
        temporary.mkdir()
        content = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        save_file(content, temporary / TENSORS, metadata={"format": "pt"})
        about = {**config["fedlens"], "schema": SCHEMA, "sha256": sha256(temporary / TENSORS)}
        write_json(temporary / CONFIG, {**config, "fedlens": about})
        (temporary / CARD).write_text(card, encoding="utf-8", newline="\n")
        # safetensors lets only its owner read a file, whatever the umask says.
        (temporary / TENSORS).chmod((temporary / CARD).stat().st_mode)


def _split(
    config: Mapping[str, Any], tensors: Params, folder: Path
) -> tuple[torch.Tensor, torch.Tensor, Params]:
    """The head's weight [C, D] and bias, and the backbone's tensors."""
    names = _value(config, "label_names", list, folder)
    classifiers = _value(config["fedlens"], "classifier", list, folder)
    prefixes = tuple(f"{name}." for name in classifiers)
    first = str(next(iter(classifiers), ""))  # several have the same content
    weight, bias = (tensors.get(f"{first}.{part}") for part in ("weight", "bias"))
    if weight is None or bias is None or weight.ndim < 2 or len(weight) != len(names):
        raise FedlensError(
            f"{folder / TENSORS} has no classifier {', '.join(map(str, classifiers))} of "
            f"{len(names)} classes: export the model again."
        )
    rest = {name: value for name, value in tensors.items() if not name.startswith(prefixes)}
    return weight.flatten(1), bias, rest  # some of timm's classifiers are 1×1 convolutions


def _build(
    folder: Path,
    about: Mapping[str, Any],
    name: str,
    resolution: int,
    factory: Callable[[], nn.Module] | None,
) -> nn.Module:
    """The backbone with random weights: the given one, or by its name.

    The name of somebody's own function is not looked up: a folder must not decide which code is
    run.
    """
    if factory is not None:
        module = factory()
        if not isinstance(module, nn.Module):
            raise FedlensError(
                f"backbone returned {type(module).__name__}, not a torch.nn.Module: pass the "
                f"function that makes {name}."
            )
        return with_features(
            module, name=name, resolution=resolution, features=about.get("features")
        )
    if about.get("own_backbone") or ("." in name and not name.startswith("timm:")):
        raise FedlensError(
            f"{folder} has the backbone {name}, which is not part of fedlens or timm: pass the "
            "function that makes it, as in fl.load_model(path, backbone=make_net)."
        )
    return backbones.create(backbones.find(name), resolution=resolution)


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise FedlensError(
            f"{folder} is a run: write its model with `fedlens export {folder} --out DIR` first."
            if (folder / "config.yaml").is_file()
            else f"{folder} is not an exported model: it has no {CONFIG}."
        )
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict) or not isinstance(config.get("fedlens"), dict):
        raise FedlensError(f"{folder / CONFIG} was not written by `fedlens export`.")
    return config


def _value(values: Mapping[str, Any], key: str, kind: type[T], folder: Path) -> T:
    value = values.get(key)
    if not isinstance(value, kind):
        raise FedlensError(
            f"{folder / CONFIG} is damaged: '{key}' is {value!r}. Export the model again."
        )
    return value


def _channels(values: Mapping[str, Any], key: str, folder: Path) -> Channels:
    numbers = _value(values, key, list, folder)
    if len(numbers) != 3 or not all(isinstance(number, int | float) for number in numbers):
        raise FedlensError(
            f"{folder / CONFIG} is damaged: '{key}' is not three numbers. Export the model again."
        )
    return float(numbers[0]), float(numbers[1]), float(numbers[2])


def _read_tensors(path: Path, expected_sha256: str) -> dict[str, torch.Tensor]:
    try:
        if sha256(path) != expected_sha256:
            raise FedlensError(
                f"{path} is damaged or was changed (its hash differs from {CONFIG}): copy or "
                "export the model again."
            )
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise FedlensError(f"{path} cannot be read ({error}): export the model again.") from error
