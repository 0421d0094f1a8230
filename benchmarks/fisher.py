"""Exact Fisher sensitivity: our one backward pass against one backward pass per example.

The loop differentiates the graph of the whole batch once per example, with weight gradients, as
TaLoS's own code does; a few examples of it are timed and scaled up to the batch. The cost of our
pass is also reported as a multiple of one plain forward and backward pass of the same batch.
Run: python benchmarks/fisher.py
"""

from collections.abc import Callable

import torch

from fedlens import rng
from fedlens.models import heads
from fedlens.models.architectures import backbones
from fedlens.models.classifier import Classifier
from fedlens.runtime.allocator import keep_large_blocks
from fedlens.sparse.sensitivity.per_example_gradients import SquaredGradients
from side_by_side import compare, print_table, print_verdict

BACKBONE, RESOLUTION, BATCH, CLASSES = "dino_vits16", 96, 64, 100
TIMED = 4  # examples of the loop in a repeat
MIN_SPEED_UP, MAX_COST = 25.0, 1.5


def scored(model: Classifier) -> list[str]:
    """All weights that a mask may cover: matrices and kernels of the backbone."""
    return [
        name
        for name, value in model.named_parameters()
        if name.startswith("backbone.")
        and value.ndim >= 2
        and not name.endswith(("cls_token", "pos_embed"))
    ]


def ours(
    squares: SquaredGradients, inputs: torch.Tensor, labels: torch.Tensor
) -> Callable[[], int]:
    def work() -> int:
        squares.add(inputs, lambda logits: [logits.gather(1, labels[:, None])[:, 0]])
        return BATCH

    return work


def plain(model: Classifier, inputs: torch.Tensor, labels: torch.Tensor) -> Callable[[], int]:
    def work() -> int:
        model.zero_grad()
        model(inputs).gather(1, labels[:, None]).sum().backward()
        return BATCH

    return work


def loop(
    model: Classifier, names: list[str], inputs: torch.Tensor, labels: torch.Tensor
) -> Callable[[], int]:
    """The graph is made beforehand: a forward pass costs little next to 64 backward passes."""
    weights = [model.get_parameter(name) for name in names]
    sums = [torch.zeros_like(weight) for weight in weights]
    targets = model(inputs).gather(1, labels[:, None])[:, 0]

    def work() -> int:
        for target in targets[:TIMED]:
            gradients = torch.autograd.grad(target, weights, retain_graph=True)
            for total, gradient in zip(sums, gradients, strict=True):
                total.addcmul_(gradient, gradient)
        return TIMED

    return work


def main() -> None:
    keep_large_blocks()  # as every run does
    draw = rng.generator(0, "benchmark")
    backbone = backbones.create(backbones.find(BACKBONE), resolution=RESOLUTION)
    model = Classifier(backbone, heads.linear(backbones.width(backbone), CLASSES, 0)).eval()
    inputs = torch.randn(BATCH, 3, RESOLUTION, RESOLUTION, generator=draw)
    labels = torch.randint(CLASSES, (BATCH,), generator=draw)
    names = scored(model)
    squares = SquaredGradients(model, names, inputs[:2])
    one_pass = ours(squares, inputs, labels)
    cost = compare(
        {"plain": plain(model, inputs, labels), "one pass": one_pass}, min_repeats=5, max_repeats=9
    )
    model.zero_grad()
    slow = compare(
        {"one pass": one_pass, "loop": loop(model, names, inputs, labels)},
        min_repeats=2,
        max_repeats=3,
        uncertainty=0.1,
    )
    print(
        f"{BACKBONE}, {RESOLUTION} px, batch {BATCH}, {len(names)} weights scored, "
        f"{torch.get_num_threads()} threads; examples per second "
        f"(of the loop, {TIMED} examples in a repeat and no forward pass)"
    )
    print_table(
        ["against", "one pass", "the other", "ratio", "repeats"],
        [
            [
                name,
                f"{comparison.speed('one pass'):.2f}",
                f"{comparison.speed(other):.2f}",
                f"{comparison.ratio:.2f}",
                str(len(comparison.ratios)),
            ]
            for name, other, comparison in (
                ("the loop", "loop", slow),
                ("a plain pass (as cost)", "plain", cost),
            )
        ],
    )
    figures = {"speed_up": slow.ratio, "cost": cost.ratio}
    met = slow.ratio >= MIN_SPEED_UP and cost.ratio <= MAX_COST
    print_verdict("fisher", figures, {"speed_up": MIN_SPEED_UP, "cost": MAX_COST}, met)


if __name__ == "__main__":
    main()
