"""Two processes with one thread each against one process with two threads: images per second.

`fedlens suite --jobs 2` runs two processes. Run: python benchmarks/jobs.py
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context

import torch
import torch.nn.functional as F

from fedlens.models import heads
from fedlens.models.architectures import backbones
from fedlens.models.classifier import Classifier
from fedlens.runtime.allocator import keep_large_blocks
from side_by_side import compare, print_table, print_verdict

SETTINGS = (
    ("vit_tiny", 64, 8, 12),
    ("vit_tiny", 112, 32, 3),
)  # backbone, px, batch, steps
CLASSES = 100
MIN_RATIO = 1.0

Setting = tuple[str, int, int, int]


@cache
def _prepared(setting: Setting) -> tuple[Classifier, torch.optim.SGD, torch.Tensor, torch.Tensor]:
    name, resolution, batch, _ = setting
    keep_large_blocks()  # as every run does
    backbone = backbones.create(backbones.find(name), resolution=resolution)
    model = Classifier(backbone, heads.linear(backbones.width(backbone), CLASSES, 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(batch, 3, resolution, resolution, generator=draw)
    return model, optimizer, inputs, torch.randint(CLASSES, (batch,), generator=draw)


def train(setting: Setting, threads: int) -> int:
    torch.set_num_threads(threads)
    model, optimizer, inputs, labels = _prepared(setting)
    for _ in range(setting[3]):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return setting[3] * len(labels)


def spread(pool: ProcessPoolExecutor, setting: Setting) -> Callable[[], int]:
    def work() -> int:
        return sum(pool.map(train, [setting] * 2, [1] * 2))

    return work


def main() -> None:
    figures, rows = {}, []
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for setting in SETTINGS:
            comparison = compare(
                {"two": spread(pool, setting), "one": lambda s=setting: train(s, 2)}
            )
            name, resolution, batch, _ = setting
            figures[f"{name}_{resolution}px_batch{batch}"] = comparison.ratio
            rows.append(comparison.row(f"{name}, {resolution} px, batch {batch}"))
    print_table(["setting", "2 processes × 1 thread", "1 × 2", "ratio", "repeats"], rows)
    met = min(figures.values()) >= MIN_RATIO
    print_verdict("jobs", figures, {"min_ratio": MIN_RATIO}, met)


if __name__ == "__main__":
    main()
