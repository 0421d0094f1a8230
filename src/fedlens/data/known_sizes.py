"""How many classes and images a dataset has, before it is loaded: for plans and costs. No torch."""

from collections.abc import Mapping
from typing import Any

from fedlens.data.sources.folder_layout import layout
from fedlens.errors import FedlensError
from fedlens.paths import expanded

Sizes = tuple[int, int, int]  # classes, training images, test images

TORCHVISION: dict[str, Sizes] = {
    "CIFAR10": (10, 50_000, 10_000),
    "CIFAR100": (100, 50_000, 10_000),
    "MNIST": (10, 60_000, 10_000),
    "FashionMNIST": (10, 60_000, 10_000),
    "SVHN": (10, 73_257, 26_032),
    "STL10": (10, 5_000, 8_000),
    "Food101": (101, 75_750, 25_250),
    "Flowers102": (102, 2_040, 6_149),
    "OxfordIIITPet": (37, 3_680, 3_669),
    "DTD": (47, 3_760, 1_880),
    "EuroSAT": (10, 21_600, 5_400),
    "GTSRB": (43, 26_640, 12_630),
}


def folder(parameters: Mapping[str, Any]) -> Sizes | None:
    """Counted by the files' names; None where the folder is not there."""
    try:
        found = layout(expanded(parameters["root"]))
    except (FedlensError, TypeError):
        return None
    if found.test is not None:
        return len(found.classes), len(found.train), len(found.test)
    test = round(len(found.train) * parameters["test_fraction"])
    return len(found.classes), len(found.train) - test, test


def torchvision(parameters: Mapping[str, Any]) -> Sizes | None:
    """As published; a split that fedlens makes is of the usual fraction."""
    return TORCHVISION.get(parameters["dataset"])
