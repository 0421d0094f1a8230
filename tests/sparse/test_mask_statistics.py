import json
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from fedlens.errors import FedlensError
from fedlens.models.classifier import Classifier
from fedlens.rng import Stream
from fedlens.sparse import parameter_groups
from fedlens.sparse.mask_statistics import by_chance, density_by_layer_and_kind, jaccard, overlap
from fedlens.sparse.masks import Masks, select


def tally(trained: int, total: int) -> dict[str, Any]:
    return {"trained": trained, "total": total, "density": trained / total}


def mask(*bits: int) -> Masks:
    return {"w": torch.tensor(bits, dtype=torch.bool)}


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    backbone = VisionTransformer(
        img_size=8, patch_size=4, embed_dim=12, depth=2, num_heads=2, num_classes=0
    )
    parameters = dict(Classifier(backbone, nn.Linear(12, 3)).named_parameters())
    names = parameter_groups.maskable(
        parameters, prefix="backbone.", biases=True, norms=True, embeddings=True
    )
    return {name: parameters[name] for name in names}


def test_density_by_hand() -> None:
    qkv = torch.zeros(6, 2, dtype=torch.bool)
    qkv[0] = True  # one of two rows of q
    qkv[4:] = True  # all of v
    masks = {
        "backbone.patch_embed.proj.weight": torch.ones(2, 1, 2, 2, dtype=torch.bool),
        "backbone.blocks.0.attn.qkv.weight": qkv,
        "backbone.blocks.0.mlp.fc1.weight": torch.zeros(3, 2, dtype=torch.bool),
        "backbone.blocks.1.mlp.fc1.weight": torch.tensor([[True, False]]),
    }
    assert density_by_layer_and_kind(masks, prefix="backbone.") == {
        "all": tally(8 + 6 + 1, 8 + 12 + 6 + 2),
        "tensors": {
            "backbone.patch_embed.proj.weight": tally(8, 8),
            "backbone.blocks.0.attn.qkv.weight": tally(6, 12),
            "backbone.blocks.0.mlp.fc1.weight": tally(0, 6),
            "backbone.blocks.1.mlp.fc1.weight": tally(1, 2),
        },
        "layers": {"embedding": tally(8, 8), "block 0": tally(6, 18), "block 1": tally(1, 2)},
        "kinds": {
            "patch": tally(8, 8),
            "q": tally(2, 4),
            "k": tally(0, 4),
            "v": tally(4, 4),
            "mlp": tally(1, 8),
        },
        "table": {
            "embedding": {"patch": tally(8, 8)},
            "block 0": {"q": tally(2, 4), "k": tally(0, 4), "v": tally(4, 4), "mlp": tally(0, 6)},
            "block 1": {"mlp": tally(1, 2)},
        },
    }


def test_every_sum_of_a_real_model_s_table_is_the_whole(weights: dict[str, torch.Tensor]) -> None:
    masks = select(weights, "random", 0.3, stream=Stream(0, ()))
    record = density_by_layer_and_kind(masks, prefix="backbone.")
    total = sum(value.numel() for value in weights.values())
    assert record["all"] == tally(round(0.3 * total), total)
    cells = [cell for row in record["table"].values() for cell in row.values()]
    for parts in (cells, *(list(record[by].values()) for by in ("tensors", "layers", "kinds"))):
        assert sum(part["trained"] for part in parts) == record["all"]["trained"]
        assert sum(part["total"] for part in parts) == total
    assert list(record["layers"]) == ["embedding", "block 0", "block 1", "final"]
    assert list(record["kinds"]) == ["patch", "embedding", "q", "k", "v", "proj", "mlp", "norm"]
    assert record["kinds"]["q"]["total"] == 2 * (12 * 12 + 12)


def test_records_are_plain_enough_for_json(weights: dict[str, torch.Tensor]) -> None:
    masks = select(weights, "random", 0.3, stream=Stream(0, ()))
    for record in (
        density_by_layer_and_kind(masks, prefix="backbone."),
        overlap({"one": masks, "two": masks}),
    ):
        assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_overlap_by_hand() -> None:
    found = overlap({"a": mask(1, 1, 0, 0), "b": mask(0, 1, 1, 0), "c": mask(0, 0, 0, 0)})
    assert found["labels"] == ["a", "b", "c"]
    assert found["jaccard"] == [[1, 1 / 3, 0], [1 / 3, 1, 0], [0, 0, 1]]
    assert found["by_chance"] == [[1 / 3, 1 / 3, 0], [1 / 3, 1 / 3, 0], [0, 0, 1]]


def test_overlap_counts_weights_not_tensors() -> None:
    one = {"big": torch.ones(9, dtype=torch.bool), "small": torch.zeros(1, dtype=torch.bool)}
    other = {"small": torch.ones(1, dtype=torch.bool), "big": torch.ones(9, dtype=torch.bool)}
    assert jaccard(one, other) == 0.9


def test_random_masks_overlap_by_chance() -> None:
    weights = {"w": torch.zeros(20_000)}
    one, other = (
        select(weights, "random", density, stream=Stream(seed, ()))
        for seed, density in ((0, 0.3), (1, 0.1))
    )
    assert by_chance(0.3, 0.1) == pytest.approx(0.03 / 0.37)
    assert jaccard(one, other) == pytest.approx(by_chance(0.3, 0.1), abs=0.01)
    assert by_chance(1.0, 1.0) == 1.0


def test_masks_of_different_models_are_not_compared() -> None:
    with pytest.raises(FedlensError, match="'a' and 'b' do not cover the same weights"):
        overlap({"a": mask(1, 0), "b": mask(1, 0, 0)})
    with pytest.raises(FedlensError, match="missing w"):
        overlap({"a": mask(1, 0), "b": {"v": mask(1, 0)["w"]}})
