"""Training throughput of each trained part over full fine-tuning: LoRA, biases, blocks, linearised.

The same model, batch and optimizer; what differs is which part has gradients, and for linearised
fine-tuning the forward-mode derivative. Run: python benchmarks/trained_parts.py
"""

from collections.abc import Callable

import torch

from fedlens import rng
from fedlens.models import heads
from fedlens.models.architectures import backbones
from fedlens.models.classifier import Classifier
from fedlens.registry import trainable
from fedlens.training.precision import Precision
from fedlens.training.step import StepSettings, train_step
from side_by_side import compare, print_table

BACKBONE, PIXELS, BATCH, CLASSES = "vit_tiny", 64, 32, 100
PARTS = (
    ("last_blocks", {"count": 1}),
    ("biases_and_norms", {}),
    ("lora", {"rank": 12}),
    ("lora", {"rank": 12, "average": "products"}),
    ("linearised", {}),
)


def work_of(part: str, parameters: dict[str, object]) -> Callable[[], int]:
    row = trainable[part]
    backbone = backbones.create(backbones.find(BACKBONE), resolution=PIXELS)
    row.make(backbone, rng.Stream(0, ("benchmark",)), **row.checked(parameters))
    head = heads.linear(backbones.width(backbone), CLASSES, 0).requires_grad_(False)
    linearised = bool(row.traits.get("linearised"))
    model = Classifier(backbone.eval(), head, linearised=linearised)
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-4, momentum=0.9)
    draw = rng.generator(0, "benchmark")
    inputs = torch.randn(BATCH, 3, PIXELS, PIXELS, generator=draw)
    labels = torch.randint(CLASSES, (BATCH,), generator=draw)
    settings = StepSettings(Precision("fp32", "cpu"))

    def work() -> int:
        train_step(model, optimizer, inputs, labels, settings)
        return BATCH

    return work


def main() -> None:
    rows = []
    for part, parameters in PARTS:
        sides = {"part": work_of(part, dict(parameters)), "full": work_of("full", {})}
        label = trainable[part].described(dict(parameters))
        rows.append(compare(sides).row(f"{label} {parameters.get('average', '')}".strip()))
    print(f"{BACKBONE} at {PIXELS} px, batch {BATCH}, {torch.get_num_threads()} threads")
    print_table(["part", "images/s", "full, images/s", "ratio", "repeats"], rows)


if __name__ == "__main__":
    main()
