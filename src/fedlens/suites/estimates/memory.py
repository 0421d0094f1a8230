"""The memory that a run takes at its peak, from the counts of its tasks. No torch.

peak = process + data + max over phases of (parameters + what is kept + what a step has alive). The
phases are features of a frozen backbone, calibration, the choice of masks, training, evaluation.
"""

from collections.abc import Iterator, Mapping

from fedlens.config.schema import Config, cohort_size, cycle
from fedlens.registry import correction as corrections
from fedlens.registry import dataset
from fedlens.suites.estimates.cost import (
    CLOSED_FORM,
    EVALUATIONS,
    Count,
    Sizes,
    dataset_sizes,
    is_fitted,
    on_features,
    work_of,
)

WEIGHT, SUM, PLACE = 4, 8, 8  # bytes of a weight, of a sum in float64, of a trained entry's index
RANKING = 64  # bytes of every weight while masks are chosen: scores, their order, the former order
HALF = 0.6  # of the bytes that a step in float32 has alive, those of one in half precision
STREAMED = ("mean", "fednova", "norm_clipping")  # aggregators that keep one sum, not all updates
COPIES_WHILE_READ = 3  # of the training images
GRAMS = 5  # copies of XᵀX while a head is solved
SPARE = 1.1  # what the allocator holds, relative to what is alive


def counted_tasks(config: Config) -> list[str]:
    """The tasks whose counts `peak_memory` needs."""
    work = work_of(config)
    found = {task for task, images in work.images.items() if images}
    found |= {part.task for part in work.shared}
    return sorted((found - {"head", "visit", *EVALUATIONS, *CLOSED_FORM}) | {"evaluate"})


def peak_memory(
    config: Config, counts: Mapping[str, Count], process: int, *, on_device: bool = False
) -> int:
    """Bytes at the peak of a run; `process` is what a process takes that has loaded torch.

    `on_device`: of a GPU's memory, where images are not read.
    """
    images = _image_bytes(config)
    alive = [images + phase for phase in _phases(config, counts)]
    read = 0 if on_device else COPIES_WHILE_READ * _image_bytes(config, all_of_them=True)
    return round(process + SPARE * max(*alive, read))


def _phases(config: Config, counts: Mapping[str, Count]) -> Iterator[float]:
    """Bytes alive in each phase, besides the process and the images."""
    model, sizes = counts["evaluate"], Sizes.of(config)
    size = HALF if config.train.precision == "amp" else 1.0
    features = WEIGHT * model.features * (sizes.train + sizes.validation)
    has_features = on_features(config) or is_fitted(config)
    kept: float = WEIGHT * model.parameters + 2 * features * has_features
    entries = _trained_entries(config, model)
    evaluating = size * model.peak
    yield kept + evaluating
    if is_fitted(config):
        yield kept + GRAMS * SUM * model.features**2
    if (calibration := counts.get("calibrate")) is not None:
        yield kept + size * calibration.peak + calibration.masked * (2 * WEIGHT + PLACE)
        yield kept + calibration.masked * RANKING
    if config.sparse.density is not None:
        kept += model.masked + 3 * PLACE * entries
    kept += entries * _optimizer_bytes(config) + entries * _server_bytes(config)
    if (training := counts.get("train")) is not None:
        yield kept + size * training.peak
        yield kept + evaluating + WEIGHT * training.trained


def _trained_entries(config: Config, model: Count) -> float:
    density = config.sparse.density
    return model.trained if density is None else model.masked * density


def _optimizer_bytes(config: Config) -> int:
    """Of a trained entry: momentum, or the two moments of an adaptive optimizer."""
    optimizer = config.train.optimizer
    return WEIGHT * (2 if "momentum" not in optimizer else int(optimizer.momentum > 0))


def _server_bytes(config: Config) -> float:
    """Of a trained entry: the global model, diagnostics, and what the aggregator keeps."""
    if config.federated.clients is None:
        return 0
    algorithm = config.algorithm
    aggregator, server = algorithm.aggregator.name, algorithm.server.name
    measured = {"cosine", "sign_agreement"} & set(config.federated.diagnostics)
    total = WEIGHT * (2 + len(measured)) + SUM  # the model, an update, diagnostics, the sum
    if aggregator != "mean":
        total += SUM
    if aggregator not in STREAMED:
        total += WEIGHT * cohort_size(config.federated)
    if server != "sgd":
        total += 2 * SUM
    return total + 3 * WEIGHT * algorithm.scaffold + _remembered_bytes(config)


def _remembered_bytes(config: Config) -> float:
    """Of a trained entry: earlier models, and a correction's terms, one for each client at most."""
    correction, average = config.algorithm.correction, config.algorithm.average
    total = 0.0
    if correction.name != "none":
        states = corrections[correction.name].traits.get("client_states", False)
        total += WEIGHT * (2 * cohort_size(config.federated) if states else 1) + SUM
    for chosen, name in ((correction, "tau"), (average, "rounds")):
        if name in chosen:
            total += WEIGHT * (chosen[name] or cycle(config.federated))
    return total + (SUM if average.name != "none" else 0)


def _image_bytes(config: Config, *, all_of_them: bool = False) -> float:
    """Of the training images; those of datasets with images of all sizes stay in a mapped file.

    All of them are read, also where only a part of them is kept.
    """
    size = dataset[config.data.name].traits.get("image_size")
    known, per_class = dataset_sizes(config.data), config.data.train_per_class
    images = known["train_images"]
    if per_class and not all_of_them:
        images = min(images, per_class * known["classes"])
    return 3 * size**2 * images if size else 0
