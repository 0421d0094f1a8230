"""The suites that compare trained parts do so at equal bytes of an update."""

import pytest
import torch
from torch import nn

from fedlens.config.schema import Config
from fedlens.experiments.build import prepare
from fedlens.federated import wire
from fedlens.federated.client import trainable_parameters
from fedlens.models.architectures import backbones
from fedlens.models.classifier import Classifier
from fedlens.sparse.parameter_groups import maskable
from fedlens.suites.suite import find

GROUPS = {
    "all": ("all weights",),
    "block": ("last block", "LoRA", ", 0.08", ", 0.2"),
    "small": ("biases and norms", ", 0.0029", ", 0.013"),
}


def update_bytes(config: Config) -> int:
    """Of one update, by the shapes of a model with random weights."""
    backbone = backbones.create(backbones.find(config.backbone))
    prepare(config, backbone)
    model = Classifier(backbone, nn.Linear(2, 2).requires_grad_(False))
    trained = trainable_parameters(model)
    if config.sparse.density is None:
        return wire.size(trained)
    names = maskable(trained, prefix="backbone.")
    kept = round(config.sparse.density * sum(trained[name].numel() for name in names))
    return wire.size({names[0]: torch.empty(kept, device="meta")}, names[:1])


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["trainable_parts", "quickstart_parts"])
def test_rows_of_a_group_send_the_same_bytes_within_two_percent(suite: str) -> None:
    rows = {cell.row: cell.config for cell in find(suite).cells(seeds=1) if cell.column == "IID"}
    sizes = {row: update_bytes(config) for row, config in rows.items()}
    for group, words in GROUPS.items():
        members = {row: size for row, size in sizes.items() if any(word in row for word in words)}
        assert len(members) > 1, group
        assert max(members.values()) < 1.02 * min(members.values()), members
