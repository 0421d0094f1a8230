"""Step 1 of sparse fine-tuning: which weights a run trains, calibrated once and kept with the run.

Masks are found by what they depend on, so runs that share it (a sweep of learning rates, say) share
them too; a run keeps its own copy, which a resumed session trusts.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from fedlens import files, params
from fedlens.config.schema import Config
from fedlens.errors import FedlensError
from fedlens.experiments.build import Parts
from fedlens.experiments.calibration import calibrated
from fedlens.experiments.flower.setup import setup
from fedlens.federated.tasks import Crowd
from fedlens.runtime.stop import StopRequest
from fedlens.sparse import mask_files
from fedlens.sparse.mask_statistics import density_by_layer_and_kind as by_layer_and_kind
from fedlens.sparse.masks import RULES, Masks
from fedlens.sparse.parameter_groups import maskable
from fedlens.store.run_folder import RunFolder

log = logging.getLogger(__name__)


def masked(
    config: Config,
    parts: Parts,
    folder: RunFolder,
    stop: StopRequest,
    *,
    crowd: Crowd | None = None,
) -> Parts:
    """The parts with their masks, if the config asks for any; what they leave out is frozen.

    A `crowd` takes part in finding them, and is told.
    """
    if config.sparse.density is None:
        return parts
    candidates = maskable_of(config, parts)
    total = sum(value.numel() for value in candidates.values())
    if not round(config.sparse.density * total):
        raise FedlensError(
            f"sparse.density={config.sparse.density} of {total} weights is none at all: choose a "
            "larger one."
        )
    path = folder.masks
    if path.exists():
        masks, told = mask_files.load(path)
        if fault := params.mismatch(candidates, masks):
            raise FedlensError(f"{path} does not fit this run: {fault}.")
    else:
        masks, told = _shared(config, parts, candidates, stop, crowd)
        mask_files.save(path, masks, told)
    _sign(folder, masks)
    if not (folder.path / "masks.json").exists():
        folder.write("masks", {"provenance": told, **by_layer_and_kind(masks)})
    trained = sum(int(mask.sum()) for mask in masks.values())
    log.info("%s: %d of %d weights are trained", config.sparse.rule, trained, total)
    facts = {"weights_trained": trained, "weights_maskable": total, **told["facts"]}
    if crowd:
        head = parts.model.head if parts.prepared else None
        crowd.prepare(setup(config, parts.inputs["weights"], head=head, masks=masks))
    return replace(under(masks, parts), facts={**parts.facts, **facts})


def under(masks: Masks, parts: Parts) -> Parts:
    """The parts with these masks; tensors of which nothing is trained are frozen whole."""
    kept = {name: mask for name, mask in masks.items() if mask.any()}
    for name, value in parts.model.backbone.named_parameters(prefix="backbone"):
        value.requires_grad_(name in kept)
    return replace(parts, masks=kept)


def _sign(folder: RunFolder, masks: Masks) -> None:
    """Notes the masks in the manifest; refuses others than the run began with."""
    signed, digest = folder.manifest or {}, params.digest(masks)
    if "masks" not in signed:
        folder.write("manifest", {**signed, "masks": digest})
    elif signed["masks"] != digest:
        raise FedlensError(
            f"{folder.masks} holds other masks than {folder.name} began with: bring them back, or "
            "start another run under another run.name."
        )


def maskable_of(config: Config, parts: Parts) -> dict[str, nn.Parameter]:
    """What may be masked, of what would be trained."""
    trained = {n: p for n, p in parts.model.named_parameters() if p.requires_grad}
    told = config.sparse
    names = maskable(trained, biases=told.biases, norms=told.norms, embeddings=told.embeddings)
    return {name: trained[name] for name in names}


def _shared(
    config: Config,
    parts: Parts,
    candidates: Mapping[str, nn.Parameter],
    stop: StopRequest,
    crowd: Crowd | None,
) -> tuple[Masks, dict[str, Any]]:
    """The masks from the cache, or made and put there."""
    key = _key(config, parts, candidates)
    if crowd and "threads" in key and config.sparse.source == "clients":
        key["threads"] = f"{config.engine.threads_per_client} of each host"
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
        masks, facts = calibrated(config, parts, candidates, stop, crowd=crowd)
        told = {**key, "facts": facts}
        mask_files.save(path, masks, told)
        return masks, told

    return files.once(path, find=find, make=make, check=stop.check)


def _key(config: Config, parts: Parts, candidates: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """All that the masks depend on: of what a rule does not look at, nothing."""
    told = asdict(config.sparse)
    row = RULES[config.sparse.rule]
    key: dict[str, Any] = {
        **{k: told[k] for k in ("rule", "density", "scope", "biases", "norms", "embeddings")},
        "seed": config.seed,
        "parameters": params.digest(candidates),
    }
    if row.by != "sensitivity":
        return key
    asked = ("method", "rounds", "soft", "labels", "target", "source", "voting", "clients",
             "examples", "passes", "micro_batch")  # fmt: skip
    return {
        **key,
        **{name: told[name] for name in asked},
        **parts.inputs,
        "model": params.digest(dict(parts.model.named_parameters())),
        "data_config": {k: v for k, v in asdict(config.data).items() if k != "root"},
        "backbone": config.backbone.name,
        "resolution": config.backbone.resolution,
        "device": parts.model.head.weight.device.type,
        "partition": asdict(config.partition) if told["source"] == "clients" else None,
        "of_clients": config.federated.clients if told["source"] == "clients" else None,
        "threads": torch.get_num_threads(),  # another number, other last bits
        "torch": torch.__version__,
    }
