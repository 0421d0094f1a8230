"""Which weights a run trains: masks found once, cached by what they depend on, kept with the run.

Runs that share what their masks depend on (a sweep of learning rates, say) share the masks; a run
keeps its own copy, which a resumed session uses.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import nn

from fedlens import files, params
from fedlens.errors import FedlensError
from fedlens.experiments.build import Experiment
from fedlens.experiments.preparation.provenance import record_mask_digest
from fedlens.federated import wire
from fedlens.federated.host import CalibrationSettings, Calibrator
from fedlens.federated.sampling import uniform
from fedlens.federated.tasks import Clients
from fedlens.params import Params
from fedlens.rng import Stream
from fedlens.runtime.progress import progress_bar
from fedlens.runtime.stop import StopRequest
from fedlens.sparse import mask_files, voting
from fedlens.sparse.mask_statistics import density_by_layer_and_kind
from fedlens.sparse.masks import Masks, needs_scores, rule_row, tie_order
from fedlens.sparse.parameter_groups import maskable
from fedlens.store.run_folder import RunFolder

BACKBONE = "backbone."  # the head is never masked

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MaskSettings:
    calibration: CalibrationSettings
    seed: int
    biases: bool = False  # maskable besides the backbone's weights
    norms: bool = False
    embeddings: bool = False
    by_clients: bool = (
        False  # clients score the weights on their examples, not the validation split
    )
    voting: str | None = None  # among clients that each rank the weights; None: scores add up
    client_count: int | None = None  # clients that calibrate; None: all
    depends_on: Mapping[str, Any] | None = None  # what else calibrated masks depend on, for caching

    @property
    def scored(self) -> bool:
        """Whether the rule ranks weights by their sensitivity."""
        return needs_scores(self.calibration.rule)


def find_masks(
    experiment: Experiment,
    clients: Clients,
    settings: MaskSettings | None,
    folder: RunFolder,
    stop: StopRequest,
) -> Experiment:
    """The experiment with its masks, if it has any; all other weights are frozen."""
    if settings is None:
        return experiment
    density = settings.calibration.density
    candidates = candidates_of(experiment.model, settings)
    total = sum(value.numel() for value in candidates.values())
    if not round(density * total):
        raise FedlensError(
            f"sparse.density={density} of {total} weights rounds to no weight: choose a larger one."
        )
    path = folder.masks
    if path.exists():
        masks, provenance = mask_files.load(path)
        if fault := params.mismatch(candidates, masks):
            raise FedlensError(f"{path} does not fit this run: {fault}.")
    else:
        masks, provenance = _cached(experiment, clients, settings, candidates, stop)
        mask_files.save(path, masks, provenance)
    record_mask_digest(folder, masks)
    if not (folder.path / "masks.json").exists():
        densities = density_by_layer_and_kind(masks, prefix=BACKBONE)
        folder.write("masks", {"provenance": provenance, **densities})
    trained = sum(int(mask.sum()) for mask in masks.values())
    log.info("%s: %d of %d weights are trained", settings.calibration.rule, trained, total)
    counts = {"weights_trained": trained, "weights_maskable": total}
    experiment = experiment.with_masks(masks, {**counts, **provenance["facts"]})
    clients.share(masks=masks)
    return experiment


def candidates_of(model: nn.Module, settings: MaskSettings) -> dict[str, nn.Parameter]:
    """The parameters that may be masked, of those that would be trained."""
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    names = maskable(
        trained,
        prefix=BACKBONE,
        biases=settings.biases,
        norms=settings.norms,
        embeddings=settings.embeddings,
    )
    return {name: trained[name] for name in names}


def make_calibrator(model: nn.Module, settings: MaskSettings, stop: StopRequest) -> Calibrator:
    return Calibrator(
        model,
        candidates_of(model, settings),
        settings.calibration,
        settings.seed,
        show=lambda title: progress_bar(title, stop),
    )


def _cached(
    experiment: Experiment,
    clients: Clients,
    settings: MaskSettings,
    candidates: Mapping[str, nn.Parameter],
    stop: StopRequest,
) -> tuple[Masks, dict[str, Any]]:
    """The masks and their provenance from the cache, or calibrated and put there."""
    key = _key(experiment, settings, candidates)
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    path = files.cache_dir() / "masks" / f"{name}.safetensors"

    def find() -> tuple[Masks, dict[str, Any]] | None:
        if path.exists():
            try:
                return mask_files.load(path)
            except FedlensError as fault:
                log.warning("%s It is made again.", fault)
        return None

    def make() -> tuple[Masks, dict[str, Any]]:
        before = dict(clients.left_out)  # of the head
        masks, facts = calibrated(experiment, clients, settings, stop)
        provenance = {**key, "facts": facts}
        left_out = {
            str(client): why
            for client, why in sorted(clients.left_out.items())
            if before.get(client) != why
        }
        if left_out:  # masks for other runs are made by all clients
            return masks, {**provenance, "left_out": left_out}
        mask_files.save(path, masks, provenance)
        return masks, provenance

    return files.make_once(path, find=find, make=make, check=stop.check)


def _key(
    experiment: Experiment, settings: MaskSettings, candidates: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """All that the masks depend on, and nothing that the rule does not read."""
    calibration = asdict(settings.calibration)
    read = ("rule", "rule_parameters", "density", "scope")
    key: dict[str, Any] = {
        **{name: calibration[name] for name in read},
        "biases": settings.biases,
        "norms": settings.norms,
        "embeddings": settings.embeddings,
        "seed": settings.seed,
        "parameters": params.digest(candidates),
    }
    if (plugin := rule_row(settings.calibration.rule).plugin) is not None:
        key["plugin"] = plugin.word
    if not settings.scored:
        return key
    return {
        **key,
        **{name: value for name, value in calibration.items() if name not in read},
        "source": "clients" if settings.by_clients else "validation",
        "voting": settings.voting,
        "clients": settings.client_count,
        **experiment.input_hashes,
        "model": params.digest(dict(experiment.model.named_parameters())),
        "device": experiment.device.type,
        "torch": torch.__version__,
        **(settings.depends_on or {}),
    }


def calibrated(
    experiment: Experiment, clients: Clients, settings: MaskSettings, stop: StopRequest
) -> tuple[Masks, dict[str, Any]]:
    """The masks, and how many bytes the clients sent to find them."""
    calibrator = make_calibrator(experiment.model, settings, stop)
    density = settings.calibration.density
    if not settings.scored or not settings.by_clients:
        validation = experiment.validation

        def validation_scores(number: int) -> Params:
            assert validation is not None
            index = torch.arange(len(validation))
            return calibrator.score(validation, index, number, "validation").mean()

        return calibrator.rank(validation_scores).masks(density), {}
    everyone = len(clients.sizes)
    size = settings.client_count or everyone
    drawn = uniform(settings.seed, 0, everyone, size)
    if settings.voting is not None:
        stream = Stream(settings.seed, ("calibrate",))
        rule, scope = settings.calibration.rule, settings.calibration.scope
        like = tie_order(calibrator.candidates, rule, scope=scope, stream=stream)
        ranking = voting.merge(clients.rankings(drawn, like), settings.voting, stream=stream)
        bytes_up = len(drawn) * _size(calibrator, torch.int32)  # each client sends ranks once
        return ranking.masks(density), {"calibration_bytes_up": bytes_up}
    rounds: list[int] = []

    def client_scores(number: int) -> Params:
        rounds.append(number)
        parts = clients.sensitivities(drawn, number, calibrator.candidates)
        return reduce(add, parts).mean()

    masks = calibrator.rank(client_scores).masks(density)
    bytes_up = len(rounds) * len(drawn) * _size(calibrator, torch.float64)
    return masks, {"calibration_bytes_up": bytes_up}


def _size(calibrator: Calibrator, dtype: torch.dtype) -> int:
    """Bytes of one value of each candidate weight, as serialised."""
    values = {name: value.to("meta", dtype) for name, value in calibrator.candidates.items()}
    return wire.size(values)
