"""What works with which family of models, as docs/reference/models.md says: every cell is run."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from timm import create_model
from torch import nn

import fedlens as fl
from fedlens import params, rng
from fedlens.config.compose import compose
from fedlens.experiments.run import start
from fedlens.models import heads
from fedlens.models.architectures import backbones, blocks
from fedlens.models.classifier import Classifier
from fedlens.registry import backbone as registry
from fedlens.sparse.parameter_groups import group, maskable
from fedlens.store.run_folder import RunFolder

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
# A small member of each family: a timm name, the arguments that make it small, and its blocks.
FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "ViT": ("vit_tiny_patch16_224", {"embed_dim": 12, "depth": 3, "num_heads": 2}, 3),
    "ViT with registers": (
        "vit_small_patch14_reg4_dinov2",
        {"patch_size": 16, "embed_dim": 12, "depth": 2, "num_heads": 2},
        2,
    ),
    "Swin": (
        "swin_tiny_patch4_window7_224",
        {"window_size": 2, "embed_dim": 8, "depths": (1, 1, 2, 1), "num_heads": (1, 1, 2, 2)},
        5,
    ),
    "ConvNeXt": ("convnext_atto", {"depths": (1, 1, 2, 1), "dims": (8, 8, 16, 16)}, 5),
    "ResNet": ("resnet10t", {"channels": (8, 8, 16, 16), "stem_width": 8}, 4),
}
CLASSES, RESOLUTION = 3, 32
SETTING = [
    *("data=synthetic", "augment=none", "data.train_per_class=2", "data.test_per_class=1"),
    *("data.validation=0.5", "federated.clients=3", "federated.participation=0.6"),
    *("federated.rounds=2", "federated.local_steps=2", "train.batch_size=8", "train.lr=0.01"),
    *("sparse.rounds=1", "sparse.examples=8", "evaluate.every=2", "threads=1"),
]


@pytest.fixture(scope="module", autouse=True)
def rows() -> Iterator[None]:
    """Each family as a backbone of somebody's own."""
    before = dict(registry.added)
    for family, (name, arguments, _) in FAMILIES.items():

        def make(resolution: int, name: str = name, more: Any = arguments) -> nn.Module:
            size = {} if name.startswith(("resnet", "convnext")) else {"img_size": resolution}
            return create_model(name, pretrained=False, num_classes=10, **size, **more)

        make.__module__ = make.__qualname__ = row_name(family)
        fl.backbone(label=family, name=row_name(family), resolution=RESOLUTION)(make)
    yield
    registry.added = before


def row_name(family: str) -> str:
    return f"small_{family.lower().replace(' ', '_')}"


@cache
def model_of(family: str) -> Classifier:
    made = backbones.create(backbones.find(row_name(family)), seed=1)
    model = Classifier(made, heads.linear(backbones.width(made), CLASSES, 0)).eval()
    for name, value in model.named_parameters():  # timm starts scales and biases at 0 or 1e-6
        if value.ndim == 1:
            noise = torch.randn(value.shape, generator=rng.generator(0, "noise", name))
            params.assign({name: value}, {name: 1 + noise / 4 if group_of(model, name) else noise})
    return model


def group_of(model: nn.Module, name: str) -> bool:
    return group(name, dict(model.named_parameters())) == "norms"


def images(count: int) -> torch.Tensor:
    draw = rng.generator(0, "images")
    return torch.randn(count, 3, RESOLUTION, RESOLUTION, generator=draw)


@cache
def run_of(family: str, root: Path) -> RunFolder:
    words = [*SETTING, f"backbone={row_name(family)}", f"run.root={root}", "head.l2=1"]
    return start(compose("sparse_fedavg", [*words, "sparse.density=0.1"]))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families") / "runs"


families = pytest.mark.parametrize("family", FAMILIES)


@families
def test_ridge_head(family: str, root: Path) -> None:
    result = run_of(family, root).result or {}
    assert result["labels"]["head"] == "ridge head"
    assert result["facts"]["l2"] == 1
    assert 0 <= result["test"]["top1"] <= 1


@families
def test_fisher(family: str) -> None:
    """The fast sensitivities are the squared gradients of one example after the other."""
    model, inputs, labels = model_of(family), images(3), torch.tensor([0, 1, 2])
    names = maskable(dict(model.named_parameters()), prefix="backbone.")
    scores = fl.fisher(model, (inputs, labels), labels="data", parameters=names)
    expected = {name: torch.zeros(scores[name].shape, dtype=torch.float64) for name in names}
    for image, label in zip(inputs, labels, strict=True):
        model.zero_grad()
        model(image[None])[0, label].backward()
        for name in names:
            gradient = model.get_parameter(name).grad
            assert gradient is not None
            expected[name] += gradient.double().square() / len(labels)
    for name in names:
        assert (scores[name] - expected[name]).norm() <= 1e-3 * expected[name].norm(), name


@families
def test_masks(family: str, root: Path) -> None:
    """Matrices and kernels are masked, one weight in ten; norms, scales, tables and tokens not."""
    model = model_of(family)
    named = dict(model.named_parameters())
    names = maskable(named, prefix="backbone.")
    masked = [
        f"backbone.{path}.weight"
        for path, module in model.backbone.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    assert sorted(names) == sorted(masked)
    masks = fl.mask(model, rule="random", density=0.1, parameters=names)
    total = sum(named[name].numel() for name in names)
    assert sum(int(one.sum()) for one in masks.values()) == round(0.1 * total)
    facts = (run_of(family, root).result or {})["facts"]
    assert (facts["weights_maskable"], facts["weights_trained"]) == (total, round(0.1 * total))


@families
def test_last_blocks(family: str) -> None:
    made = backbones.create(backbones.find(row_name(family)))
    depth = FAMILIES[family][2]
    assert len(blocks.block_paths(made)) == depth
    last = blocks.block_paths(made)[-1]
    numbers = [number for number, _ in blocks.numbered(made)]
    assert numbers == sorted(numbers)  # parameters come in the order of the forward pass
    assert {-1, *range(depth)} <= set(numbers) <= {-1, *range(depth + 1)}
    blocks.last_blocks(made, 1)
    trained = {name for name, value in made.named_parameters() if value.requires_grad}
    assert {name for name, _ in made.named_parameters() if name.startswith(f"{last}.")} <= trained
    rest = {name.partition(".")[2] for name in trained if not name.startswith(f"{last}.")}
    assert all("norm" in name or name.startswith("layers.3.downsample") for name in rest) or (
        family == "ConvNeXt" and all(name.startswith(("stages.3.", "head.norm")) for name in rest)
    )


@families
def test_federation(family: str, root: Path) -> None:
    folder = run_of(family, root)
    records = [one for one in folder.journal("metrics").read() if "train" in one]
    assert [one["round"] for one in records] == [1, 2]
    assert all(one["train"]["loss"] < 100 for one in records)
    assert max(records[-1]["update_norms"]) > 0


COLUMNS = {
    "ridge head": test_ridge_head,
    "Fisher": test_fisher,
    "masks": test_masks,
    "last blocks": test_last_blocks,
    "federation": test_federation,
}


def test_the_page_says_what_these_tests_run() -> None:
    lines = re.findall(r"^\|(.*)\|$", PAGE.read_text(encoding="utf-8"), re.M)
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    header = next(row for row in cells if row[0] == "family")
    start_ = cells.index(header)
    assert header == ["family", "tested with", *COLUMNS]
    table = {row[0]: row[1:] for row in cells[start_ + 2 : start_ + 2 + len(FAMILIES)]}
    assert table == {
        family: [f"`timm:{name}`, made smaller", *["yes"] * len(COLUMNS)]
        for family, (name, _, _) in FAMILIES.items()
    }


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("resnet18", 8),
        ("convnext_atto", 12),
        ("swin_tiny_patch4_window7_224", 12),
        ("swinv2_cr_tiny_224", 12),
        ("vit_small_patch14_reg4_dinov2", 12),
        ("efficientnet_b0", 16),
    ],
)
def test_models_of_full_size_are_sequences_of_blocks(name: str, depth: int) -> None:
    with torch.device("meta"):
        model = create_model(name, num_classes=0)
    assert len(blocks.block_paths(model)) == depth
    numbers = {number for number, _ in blocks.numbered(model)}
    assert {-1, *range(depth)} <= numbers
