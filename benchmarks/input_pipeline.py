"""Images per second: our batches against a torchvision DataLoader with per-sample transforms.

Same images, augmentation (crop with padding, flip), bicubic resize and normalisation on both sides.
Run: python benchmarks/input_pipeline.py   (FEDLENS_DATA: the folder with the real CIFAR-100)
"""

import os
from collections.abc import Callable
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from torchvision import transforms
from torchvision.datasets import CIFAR100

from fedlens import rng
from fedlens.data.examples import ImageExamples, shuffled
from fedlens.data.images import Images
from fedlens.data.transforms import Augmentation, Pipeline
from fedlens.runtime.allocator import keep_large_blocks
from side_by_side import compare, print_table, print_verdict

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RESOLUTIONS = (96, 160, 224)
BATCH, WORKERS, PADDING = 64, 2, 4
OUR_BATCHES, THEIR_BATCHES = 48, 16  # in a repeat
MIN_RATIO = 5.0


class PerSample(TorchDataset[tuple[torch.Tensor, int]]):
    """What torchvision's CIFAR100 does for an item, also for data that is not CIFAR-100."""

    def __init__(self, pixels: NDArray[np.uint8], labels: list[int], resolution: int) -> None:
        self.pixels, self.labels = pixels, labels
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=PADDING),
                transforms.RandomHorizontalFlip(),
                transforms.Resize(resolution, transforms.InterpolationMode.BICUBIC),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )

    def __len__(self) -> int:
        return THEIR_BATCHES * BATCH

    def __getitem__(self, item: int) -> tuple[torch.Tensor, int]:
        return self.transform(Image.fromarray(self.pixels[item])), self.labels[item]


def load() -> tuple[str, NDArray[np.uint8], list[int]]:
    if root := os.environ.get("FEDLENS_DATA"):
        stored = CIFAR100(root, train=True)
        return "CIFAR-100", stored.data, stored.targets
    source = np.random.default_rng(0)
    pixels = source.integers(0, 256, (50_000, 32, 32, 3), dtype=np.uint8)
    return "random pixels (no FEDLENS_DATA)", pixels, source.integers(0, 100, 50_000).tolist()


def ours(pixels: NDArray[np.uint8], labels: list[int], resolution: int) -> Callable[[], int]:
    images = Images(torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels))
    pipeline = Pipeline(resolution, MEAN, STD, Augmentation(crop_padding=PADDING, flip=True))
    examples = ImageExamples(images, None, pipeline)
    epochs = count()

    def work() -> int:
        seen, epoch = 0, next(epochs)
        order = shuffled(len(examples), BATCH, rng.generator(0, "order", epoch))
        for step, index in enumerate(order[:OUR_BATCHES]):
            inputs = examples.batch(index, rng.generator(0, "augment", epoch, step))
            assert inputs.shape == (BATCH, 3, resolution, resolution)
            assert examples.labels[index].shape == (BATCH,)
            seen += len(inputs)
        return seen

    return work


def theirs(pixels: NDArray[np.uint8], labels: list[int], resolution: int) -> Callable[[], int]:
    loader = DataLoader(
        PerSample(pixels, labels, resolution),
        batch_size=BATCH,
        shuffle=True,
        num_workers=WORKERS,
        persistent_workers=True,
    )

    def work() -> int:
        """A whole pass, so that no worker is still prefetching while the other side is measured."""
        seen = 0
        for inputs, _ in loader:
            assert inputs.shape == (BATCH, 3, resolution, resolution)
            seen += len(inputs)
        return seen

    return work


def main() -> None:
    keep_large_blocks()  # as every run does
    name, pixels, labels = load()
    print(
        f"{name}, batch {BATCH}, {torch.get_num_threads()} threads against {WORKERS} workers; "
        "images per second, median of repeats"
    )
    figures, rows = {}, []
    for resolution in RESOLUTIONS:
        comparison = compare(
            {
                "fedlens": ours(pixels, labels, resolution),
                "DataLoader": theirs(pixels, labels, resolution),
            }
        )
        figures[f"{resolution}px"] = comparison.ratio
        speeds = [f"{comparison.speed(side):,.0f}" for side in comparison.speeds]
        ratio = f"{comparison.ratio:.1f}x ± {comparison.ratio * comparison.uncertainty:.1f}"
        rows.append([f"{resolution} px", *speeds, ratio, str(len(comparison.ratios))])
    print_table(["output", "fedlens", "DataLoader", "ratio", "repeats"], rows)
    met = min(figures.values()) >= MIN_RATIO
    print_verdict("input_pipeline", figures, {"min_ratio": MIN_RATIO}, met)


if __name__ == "__main__":
    main()
