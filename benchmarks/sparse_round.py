"""Rounds of FedAvg that train a tenth of the weights, against rounds that train all of them.

With `scattered` masks every tensor has trained entries; with `second_half`, all that lies before
the middle block is frozen, so the backward pass ends there. Masks are random, of density 0.1 in
each tensor that is trained. Run: python benchmarks/sparse_round.py
"""

from collections.abc import Callable

import torch

import fedlens as fl
from fedlens import rng
from fedlens.models import heads
from fedlens.models.architectures import backbones
from fedlens.models.classifier import Classifier
from fedlens.runtime.allocator import keep_large_blocks
from side_by_side import compare, print_table, print_verdict

BACKBONE, CLASSES, DENSITY = "vit_tiny", 100, 0.1
MIDDLE = 6  # of 12 blocks
RESOLUTIONS = (64, 112)
CLIENTS, COHORT, STEPS, BATCH = 8, 2, 4, 32
MIN_RATIO = {"scattered": 1.0, "second_half": 1.2}  # images/s over dense
Masks = dict[str, torch.Tensor]


def classifier(resolution: int) -> Classifier:
    backbone = backbones.create(backbones.find(BACKBONE), resolution=resolution)
    return Classifier(backbone, heads.linear(backbones.width(backbone), CLASSES, 0))


def scattered(model: Classifier) -> Masks:
    draw = rng.generator(0, "masks")
    return {
        name: torch.rand(parameter.shape, generator=draw) < DENSITY
        for name, parameter in model.named_parameters()
    }


def second_half(model: Classifier) -> Masks:
    """The scattered masks of the later blocks, the last norm and the head; nothing before them."""
    masks = scattered(model)
    names = list(masks)
    first = next(place for place, name in enumerate(names) if f"blocks.{MIDDLE}." in name)
    return masks | {name: torch.zeros_like(masks[name]) for name in names[:first]}


def rounds(resolution: int, masks: Callable[[Classifier], Masks] | None) -> Callable[[], int]:
    """A function that runs one round and returns the number of images trained on."""
    draw, count = rng.generator(0, "benchmark"), CLIENTS * STEPS * BATCH
    images = torch.randn(count, 3, resolution, resolution, generator=draw)
    labels = torch.randint(CLASSES, (count,), generator=draw)
    model = classifier(resolution)
    federation = fl.fedavg(
        model,
        (images, labels),
        fl.partition(labels, clients=CLIENTS, seed=0),
        lr=1e-3,
        local_steps=STEPS,
        batch_size=BATCH,
        masks=None if masks is None else masks(model),
    )
    state = federation.init()

    def work() -> int:
        nonlocal state
        cohort = federation.sample(state, participation=COHORT / CLIENTS)
        state, _ = federation.apply(state, cohort)
        return COHORT * STEPS * BATCH

    return work


def main() -> None:
    keep_large_blocks()  # as every run does
    rows, figures = [], {}
    for resolution in RESOLUTIONS:
        for masks in (scattered, second_half):
            sides = {"sparse": rounds(resolution, masks), "dense": rounds(resolution, None)}
            comparison = compare(sides, max_repeats=15, uncertainty=0.01)
            figures[f"{masks.__name__}_{resolution}"] = comparison.ratio
            rows.append(comparison.row(f"{masks.__name__}, {resolution} px"))
    print(
        f"{BACKBONE}, density {DENSITY}, {COHORT} clients × {STEPS} steps × batch {BATCH}, "
        f"{torch.get_num_threads()} threads; images per second"
    )
    print_table(["masks", "sparse", "dense", "ratio", "repeats"], rows)
    met = all(
        figures[f"{name}_{r}"] >= least for name, least in MIN_RATIO.items() for r in RESOLUTIONS
    )
    print_verdict("sparse_round", figures, {f"min_{n}": v for n, v in MIN_RATIO.items()}, met)


if __name__ == "__main__":
    main()
