"""Statistics of masks, as records for JSON: density by layer and kind, and overlap.

Overlap is the Jaccard index |A∩B| / |A∪B|; two random masks of densities a and b have about
ab / (a + b − ab), which the record gives for comparison.
"""

from collections.abc import Mapping
from typing import Any

from fedlens import params
from fedlens.errors import FedlensError
from fedlens.params import Params
from fedlens.sparse import parameter_groups

Record = dict[str, Any]


def density_by_layer_and_kind(masks: Params, *, prefix: str = "") -> Record:
    """{trained, total, density} of all, of each tensor, layer, kind and layer's kind.

    `prefix` is the path of the backbone in the model, such as "backbone.".
    """
    whole = _tally()
    tensors: dict[str, Record] = {}
    layers: dict[str, Record] = {}
    by_kind: dict[str, Record] = {}
    table: dict[str, dict[str, Record]] = {}
    for name, mask in masks.items():
        place = parameter_groups.layer(name, prefix=prefix)
        tensors[name] = _tally()
        for kind, rows in parameter_groups.pieces(name, masks, prefix=prefix).items():
            trained, total = int(mask[rows].sum()), mask[rows].numel()
            for tally in (
                whole,
                tensors[name],
                layers.setdefault(place, _tally()),
                by_kind.setdefault(kind, _tally()),
                table.setdefault(place, {}).setdefault(kind, _tally()),
            ):
                tally["trained"] += trained
                tally["total"] += total
                tally["density"] = tally["trained"] / tally["total"] if tally["total"] else 0.0
    ordered = {kind: by_kind[kind] for kind in parameter_groups.KINDS if kind in by_kind}
    return {"all": whole, "tensors": tensors, "layers": layers, "kinds": ordered, "table": table}


def overlap(masks: Mapping[str, Params]) -> Record:
    """Of every two masks: {labels, jaccard, by_chance}, the last two as matrices."""
    labels = list(masks)
    for label in labels[1:]:
        if fault := params.mismatch(masks[labels[0]], masks[label]):
            raise FedlensError(
                f"The masks '{labels[0]}' and '{label}' do not cover the same weights ({fault}): "
                "compare masks of one model."
            )
    densities = [_density(masks[label]) for label in labels]
    return {
        "labels": labels,
        "jaccard": [[jaccard(masks[one], masks[other]) for other in labels] for one in labels],
        "by_chance": [[by_chance(one, other) for other in densities] for one in densities],
    }


def jaccard(one: Params, other: Params) -> float:
    """|A∩B| / |A∪B|; 1 for two empty masks, which are equal."""
    both = sum(int((one[name] & other[name]).sum()) for name in one)
    either = sum(int((one[name] | other[name]).sum()) for name in one)
    return both / either if either else 1.0


def by_chance(one: float, other: float) -> float:
    """The expected overlap of two random masks of these densities."""
    either = one + other - one * other
    return one * other / either if either else 1.0


def _density(masks: Params) -> float:
    total = sum(mask.numel() for mask in masks.values())
    return sum(int(mask.sum()) for mask in masks.values()) / max(1, total)


def _tally() -> Record:
    return {"trained": 0, "total": 0, "density": 0.0}
