"""Step 1 of sparse fine-tuning: which weights a run trains, calibrated once and kept with the run.

Masks are found by what they depend on, so runs that share it (a sweep of learning rates, say) share
them too; a run keeps its own copy, which a resumed session trusts.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from fedlens import params
from fedlens.data.images import Examples
from fedlens.errors import FedlensError
from fedlens.experiments.build import Parts
from fedlens.experiments.config import Config
from fedlens.experiments.progress import bar
from fedlens.experiments.records import RunFolder
from fedlens.experiments.signals import StopRequest
from fedlens.federated import sampling, wire
from fedlens.files import cache_dir
from fedlens.params import Params
from fedlens.rng import Stream
from fedlens.sparse import storage, voting
from fedlens.sparse.calibrate import Score, calibrate
from fedlens.sparse.fisher import Sensitivity, sensitivity
from fedlens.sparse.inspect import density_by_layer_and_kind as by_layer_and_kind
from fedlens.sparse.kinds import maskable
from fedlens.sparse.masks import RULES, Masks, Preference
from fedlens.sparse.squares import Squares

log = logging.getLogger(__name__)


def masked(config: Config, parts: Parts, folder: RunFolder, stop: StopRequest) -> Parts:
    """The parts with their masks, if the config asks for any; what they leave out is frozen."""
    if config.sparse.density is None:
        return parts
    candidates = _candidates(config, parts)
    path = folder.masks
    if path.exists():
        masks, told = storage.load(path)
        if fault := params.mismatch(candidates, masks):
            raise FedlensError(f"{path} does not fit this run: {fault}.")
    else:
        masks, told = _shared(config, parts, candidates, stop)
        storage.save(path, masks, told)
    _sign(folder, masks)
    if not (folder.path / "masks.json").exists():
        folder.write("masks", {"provenance": told, **by_layer_and_kind(masks)})
    trained = sum(int(mask.sum()) for mask in masks.values())
    total = sum(mask.numel() for mask in masks.values())
    log.info("%s: %d of %d weights are trained", config.sparse.rule, trained, total)
    facts = {"weights_trained": trained, "weights_maskable": total, **told["facts"]}
    kept = {name: mask for name, mask in masks.items() if mask.any()}
    for name, value in parts.model.backbone.named_parameters(prefix="backbone"):
        value.requires_grad_(name in kept)
    if not trained:
        raise FedlensError(
            f"sparse.density={config.sparse.density} of {total} weights is none at all: choose a "
            "larger one."
        )
    return replace(parts, masks=kept, facts={**parts.facts, **facts})


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


def _candidates(config: Config, parts: Parts) -> dict[str, nn.Parameter]:
    """What may be masked, of what would be trained."""
    trained = {n: p for n, p in parts.model.named_parameters() if p.requires_grad}
    told = config.sparse
    names = maskable(trained, biases=told.biases, norms=told.norms, embeddings=told.embeddings)
    return {name: trained[name] for name in names}


def _shared(
    config: Config, parts: Parts, candidates: Mapping[str, nn.Parameter], stop: StopRequest
) -> tuple[Masks, dict[str, Any]]:
    """The masks from the cache, or made and put there."""
    key = _key(config, parts, candidates)
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    path = cache_dir() / "masks" / f"{name}.safetensors"
    if path.exists():
        try:
            return storage.load(path)
        except FedlensError as fault:
            log.warning("%s It is made again.", fault)
    masks, facts = _calibrated(config, parts, candidates, stop)
    told = {**key, "facts": facts}
    storage.save(path, masks, told)
    return masks, told


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


def _calibrated(
    config: Config, parts: Parts, candidates: Mapping[str, nn.Parameter], stop: StopRequest
) -> tuple[Masks, dict[str, Any]]:
    told = config.sparse
    stream = Stream(config.seed, ("calibrate",))
    sources = Sources(config, parts, list(candidates), stop)

    def preference(score: Score, whose: Stream) -> Preference:
        assert told.density is not None
        return calibrate(
            candidates,
            score,
            rule=told.rule,
            density=told.density,
            rounds=told.rounds,
            method=told.method,
            soft=told.soft,
            scope=told.scope,
            stream=whose,
        )

    assert told.density is not None
    if told.voting is None or RULES[told.rule].by != "sensitivity":
        found = preference(sources.pooled, stream)
        return found.masks(told.density), sources.facts(candidates)
    ballots = (
        preference(sources.of_client(client), Stream(config.seed, ("calibrate", client)))
        for client in sources.clients
    )
    found = voting.merge(ballots, told.voting, stream=stream)
    return found.masks(told.density), sources.facts(candidates)


class Sources:
    """Whose examples the scores come from: the validation split, or the clients' own shards."""

    def __init__(
        self, config: Config, parts: Parts, names: Sequence[str], stop: StopRequest
    ) -> None:
        self.config = config
        self.parts = parts
        self.names = names
        self.stop = stop
        self.squares: Squares | None = None
        self.asked = 0  # rounds of scores
        self.clients: list[int] = []
        scored = RULES[config.sparse.rule].by == "sensitivity"
        if scored and config.sparse.source == "clients" and parts.partition is not None:
            everyone = len(parts.partition)
            size = config.sparse.clients or everyone
            self.clients = sampling.cohort(config.seed, 0, clients=everyone, size=size)

    def pooled(self, number: int) -> Params:
        """The scores of one calibration round over everybody's examples."""
        self.asked += 1
        if not self.clients:
            assert self.parts.validation is not None
            examples = self.parts.validation
            title = f"sensitivity, round {number + 1} of {self.config.sparse.rounds}"
            return self._score(examples, None, number, "validation", title).mean()
        total: Sensitivity | None = None
        for client in self.clients:
            part = self._client(client, number)
            total = part if total is None else total + part
        assert total is not None
        return total.mean()

    def of_client(self, client: int) -> Score:
        return lambda number: self._client(client, number).mean()

    def _client(self, client: int, number: int) -> Sensitivity:
        assert self.parts.partition is not None
        title = f"sensitivity, round {number + 1} of {self.config.sparse.rounds}, client {client}"
        shard = self.parts.partition.shard(client)
        return self._score(self.parts.train, shard, number, client, title)

    def _score(
        self,
        examples: Examples,
        index: torch.Tensor | None,
        number: int,
        whose: int | str,
        title: str,
    ) -> Sensitivity:
        told = self.config.sparse
        index = torch.arange(len(examples)) if index is None else index
        stream = Stream(self.config.seed, ("calibrate", whose, number))
        if told.examples is not None and told.examples < len(index):
            chosen = torch.randperm(len(index), generator=stream.draw("examples"))
            index = index[chosen[: told.examples]]
        with bar(title, self.stop) as progress:
            return sensitivity(
                self._squares(examples, index),
                examples,
                index=index,
                labels=told.labels,
                target=told.target,
                passes=told.passes,
                stream=stream,
                micro_batch=told.micro_batch,
                progress=progress,
            )

    def _squares(self, examples: Examples, index: torch.Tensor) -> Squares:
        """Planned once, for all rounds and clients."""
        if self.squares is None:
            self.squares = Squares(self.parts.model, self.names, examples.batch(index[:2]))
        return self.squares

    def facts(self, candidates: Params) -> dict[str, Any]:
        """What calibrating sent over the network, where clients did it."""
        if not self.clients:
            return {}
        if self.config.sparse.voting:  # each sends its ranks once
            ranks = {name: value.to("meta", torch.int32) for name, value in candidates.items()}
            return {"calibration_bytes_up": len(self.clients) * wire.size(ranks)}
        scores = {name: value.to("meta", torch.float64) for name, value in candidates.items()}
        return {"calibration_bytes_up": self.asked * len(self.clients) * wire.size(scores)}
