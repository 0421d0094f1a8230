"""Exported models that are damaged, that were changed, or whose backbone is somebody's own."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fedlens as fl
from fedlens.errors import FedlensError
from fedlens.files import sha256
from fedlens.store.exported_model import check_target, write

CLASSES = ["ant", "bee", "cat"]


def make_net() -> nn.Module:
    """Somebody's own backbone: images [B, 3, 8, 8] → features [B, 4]; a part is named fedlens."""
    net = nn.Sequential()
    net.add_module("stem", nn.Conv2d(3, 4, 3, bias=False))
    net.add_module("norm", nn.BatchNorm2d(4))
    net.add_module("pool", nn.AdaptiveAvgPool2d(1))
    net.add_module("flat", nn.Flatten())
    net.add_module("fedlens", nn.Linear(4, 4))
    return net


def content(backbone: str = "mine.make_net", **about: Any) -> dict[str, Any]:
    return {
        "architecture": backbone,
        "num_classes": 3,
        "num_features": 4,
        "label_names": CLASSES,
        "model_args": {},
        "pretrained_cfg": {"mean": [0.5, 0.25, 0.5], "std": [0.5, 0.5, 0.25]},
        "fedlens": {
            "run": "one",
            "version": "0.1.0",
            "backbone": backbone,
            "resolution": 8,
            "classifier": ["fedlens_head"],
            **about,
        },
    }


@pytest.fixture
def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = make_net()
    state = net.state_dict()
    state["norm.running_mean"].uniform_(-1, 1, generator=torch.Generator().manual_seed(1))
    return net.eval()


@pytest.fixture
def folder(tmp_path: Path, net: nn.Module) -> Path:
    weight, bias = torch.arange(12.0).view(3, 4), torch.tensor([0.0, 1.0, 2.0])
    head = {"fedlens_head.weight": weight, "fedlens_head.bias": bias}
    stored = {f"module.{name}": value for name, value in net.state_dict().items()}
    write(tmp_path / "model", {**stored, **head}, content(), "# one\n")
    return tmp_path / "model"


def test_a_backbone_of_ones_own_is_given_as_a_function(folder: Path, net: nn.Module) -> None:
    model = fl.load_model(folder, backbone=make_net)
    pixels = torch.randint(256, (2, 3, 8, 8), generator=torch.Generator().manual_seed(2))
    pixels = pixels.to(torch.uint8)
    mean = torch.tensor([0.5, 0.25, 0.5]).view(3, 1, 1)
    std = torch.tensor([0.5, 0.5, 0.25]).view(3, 1, 1)
    inputs = (pixels / 255 - mean) / std
    expected = net(inputs) @ torch.arange(12.0).view(3, 4).T + torch.tensor([0.0, 1.0, 2.0])
    torch.testing.assert_close(model.preprocess(pixels), inputs)
    torch.testing.assert_close(model(model.preprocess(pixels)), expected)
    assert model.classes == ("ant", "bee", "cat")
    assert not model.training


def test_no_code_is_run_by_a_name_in_the_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('this code was run')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(fl.FedlensError, match=r"backbone mine\.make_net, .*backbone=make_net"):
        fl.load_model(folder)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (
            lambda: nn.Sequential(nn.Conv2d(3, 4, 3)),
            r"does not fit the backbone mine\.make_net: missing module",
        ),
        (lambda: "net", "returned str, not a torch"),
    ],
)
def test_another_backbone_is_refused(
    folder: Path, factory: Callable[[], Any], message: str
) -> None:
    with pytest.raises(fl.FedlensError, match=message):
        fl.load_model(folder, backbone=factory)


def change(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


def without(folder: Path, *names: str) -> None:
    """The tensors without some of them, with the hash of what is left."""
    path = folder / "model.safetensors"
    save_file({name: value for name, value in load_file(path).items() if name not in names}, path)
    change(folder, lambda config: config["fedlens"].update(sha256=sha256(path)))


def flip_a_bit(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "it has no config.json"),
    "no tensors": (lambda folder: (folder / "model.safetensors").unlink(), "cannot be read"),
    "not json": (lambda folder: (folder / "config.json").write_text("{"), "cannot be read as JSON"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "not written by"),
    "of timm": (
        lambda folder: change(folder, lambda config: config.pop("fedlens")), "not written by"
    ),
    "newer": (
        lambda folder: change(folder, lambda config: config["fedlens"].update(schema=2)), "schema 2"
    ),
    "no backbone": (
        lambda folder: change(folder, lambda config: config["fedlens"].pop("backbone")),
        "'backbone' is None",
    ),
    "no names": (
        lambda folder: change(folder, lambda config: config.pop("label_names")),
        "'label_names' is None",
    ),
    "other names": (
        lambda folder: change(folder, lambda config: config["label_names"].append("dog")),
        "no classifier fedlens_head of 4 classes",
    ),
    "two channels": (
        lambda folder: change(folder, lambda config: config["pretrained_cfg"]["mean"].pop()),
        "mean",
    ),
    "a word": (
        lambda folder: change(folder, lambda c: c["pretrained_cfg"].update(mean=["a", 1, 1])),
        "mean",
    ),
    "a size in words": (
        lambda folder: change(folder, lambda config: config["fedlens"].update(resolution="8")),
        "'resolution' is '8'",
    ),
    "one bit": (flip_a_bit, "its hash differs"),
    "short": (
        lambda folder: os.truncate(folder / "model.safetensors", 100), "its hash differs"
    ),
    "a missing tensor": (
        lambda folder: without(folder, "module.norm.running_var"), "norm.running_var"
    ),
    "a missing head": (lambda folder: without(folder, "fedlens_head.bias"), "no classifier"),
    "all damaged": (
        lambda folder: [
            (folder / "model.safetensors").write_bytes(b"text"),
            change(folder, lambda c: c["fedlens"].update(
                sha256=sha256(folder / "model.safetensors"))),
        ],
        "cannot be read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_one_sentence(folder: Path, damage: str) -> None:
    harm, words = DAMAGE[damage]
    harm(folder)
    with pytest.raises(fl.FedlensError) as caught:
        fl.load_model(folder, backbone=make_net)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_backbones_are_named(folder: Path) -> None:
    for name in ("timm:no_such_model", "no_such_model"):
        change(folder, lambda config, name=name: config["fedlens"].update(backbone=name))
        with pytest.raises(fl.FedlensError, match="no_such_model"):
            fl.load_model(folder)


def test_a_run_is_not_an_export(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(fl.FedlensError, match=r"is a run: .*fedlens export"):
        fl.load_model(tmp_path)


def test_all_files_are_written_or_none(
    folder: Path, net: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(*_: object, **__: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("fedlens.store.exported_model.write_json", fail)
    with pytest.raises(fl.FedlensError, match="the disk is full"):
        write(folder, net.state_dict(), content(), "# new\n")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_all_files_have_the_same_permissions(folder: Path) -> None:
    assert len({stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}) == 1


def test_only_an_export_of_the_same_run_is_replaced(folder: Path) -> None:
    check_target(folder, "one")
    check_target(folder.parent / "new", "two")
    with pytest.raises(fl.FedlensError, match="has other content"):
        check_target(folder, "two")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(fl.FedlensError, match="has other content"):
        check_target(folder, "one")


def test_links_in_a_circle_are_no_folder(tmp_path: Path, net: nn.Module) -> None:
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    with pytest.raises(FedlensError, match="circle"):
        write(circle, net.state_dict(), content(), "# new\n")
