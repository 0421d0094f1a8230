"""What a config's keys must satisfy, each by its range and all of them together. No torch.

A row checks its own parameters (`registry`). What cannot be is refused in one sentence that names
the key, before anything is loaded.
"""

import re
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any

from fedlens.config.schema import (
    AlgorithmConfig,
    Config,
    batch_norm,
    cohort_size,
    head_changes,
    head_only,
    parameters,
    sequential,
)
from fedlens.errors import FedlensError, shown, suggest
from fedlens.registry import (
    Parameter,
    aggregator,
    client_optimizer,
    correction,
    dataset,
    diagnostic,
    mask_rule,
    trainable,
)
from fedlens.registry import head as heads
from fedlens.training.schedules import SHAPES

PRECISIONS = ("fp32", "amp")
TRACKERS = ("none", "tensorboard", "wandb")
SCOPES = ("global", "tensor")
METHODS = ("talos", "mean")
LABELS = ("sampled", "data", "expected")
TARGETS = ("logit", "log_prob")
VOTES = ("union", "majority", "intersection")
FLOWER = ("flower_simulation", "flower")
PROXIMAL_TO = ("start", "round")
DEVICES = ("auto", "cpu", "cuda", "mps")
FEWEST_SECURE, MOST_SECURE = 3, 1023  # clients whose updates secure aggregation can add


def check_device(key: str, device: str) -> None:
    """Refuses what is not the name of a device; `key` is what comes before it."""
    kind = re.sub(r"^cuda:\d+$", "cuda", device)
    if kind not in DEVICES:
        raise FedlensError(f"{key}{shown(device)} is unknown: {suggest(kind, DEVICES)}")


def check(config: Config) -> None:
    """Refuses what cannot be run, in one sentence that names the key."""
    for section, value_of, parameter in _plain_keys():
        value, default = value_of(config), parameter.default
        if type(value) is not type(default) or value != default:
            parameter.checked(value, section)
    for key, value, options in [
        ("train.schedule.name", config.train.schedule.name, SHAPES),
        ("train.precision", config.train.precision, PRECISIONS),
        ("tracker", config.tracker.name, TRACKERS),
        ("tracker.mode", config.tracker.mode, ("online", "offline")),
        ("evaluate.select", config.evaluate.select, ("best", "last")),
        ("sparse.scope", config.sparse.scope, SCOPES),
        ("sparse.method", config.sparse.method, METHODS),
        ("sparse.labels", config.sparse.labels, LABELS),
        ("sparse.target", config.sparse.target, TARGETS),
        ("sparse.source", config.sparse.source, ("validation", "clients")),
        ("sparse.voting", config.sparse.voting or VOTES[0], VOTES),
        ("algorithm.proximal_to", config.algorithm.proximal_to, PROXIMAL_TO),
        ("privacy.name", config.privacy.name, ("none", "central", "local")),
    ]:
        if value not in options:
            raise FedlensError(f"{key}={shown(value)} is unknown: {suggest(value, options)}")
    check_device("device=", config.device)
    for name in config.federated.diagnostics:
        if diagnostic.get(name) is None:
            options = suggest(name, diagnostic.names)
            raise FedlensError(f"federated.diagnostics={shown(name)} is unknown: {options}")
    data, train, head = config.data, config.train, config.head
    selects = config.evaluate.select == "best" or train.early_stopping is not None
    chooses = any(head.get(name, 1) is None for name in ("temperature", "l2", "shrinkage"))
    for fine, complaint in [
        (
            data.root is not None or not dataset[data.name].traits.get("root_required"),
            f"data={data.name} needs data.root, the folder of your images",
        ),
        (
            data.validation > 0 or not selects,
            "data.validation=0 leaves nothing to select on: set evaluate.select=last and no "
            "train.early_stopping",
        ),
        (
            data.validation > 0 or not chooses,
            f"data.validation=0 leaves nothing to fit the {head.name} head's free numbers on: set "
            "head.temperature (and head.l2)",
        ),
        (
            not (head.freeze and head_only(config) and head.name == "linear"),
            "head.freeze=true with train.trainable=head leaves nothing to train",
        ),
        (
            config.backbone.pretrained or not (config.backbone.weights or config.backbone.sha256),
            "backbone.pretrained=false takes no file: leave backbone.weights and sha256 out",
        ),
        (
            config.backbone.freeze_blocks == 0 or _suits_frozen_blocks(train.trainable.name),
            "backbone.freeze_blocks goes with train.trainable=full, biases_and_norms, lora or a "
            f"part of your own, not with {trainable.spelled(train.trainable)}",
        ),
        (
            config.evaluate.test or not config.evaluate.test_curve,
            "evaluate.test=false never opens the test split: leave evaluate.test_curve out",
        ),
        *_optimizer_checks(config),
        *_trainable_checks(config),
        *_sparse_checks(config),
        *_federated_checks(config),
        *_chain_checks(config),
        *_refit_checks(config),
        *_privacy_checks(config),
    ]:
        if not fine:
            raise FedlensError(f"{complaint}.")


def without_effect(config: Config) -> list[str]:
    """Settings that only clients or their server read, in a run without clients.

    They are no errors, since settings of a suite are for all of its runs, central ones too.
    """
    algorithm = config.algorithm
    if config.federated.clients is not None:
        return []
    return [
        f"{key}={shown(value)}"
        for key, value, unused in [
            ("partition", config.partition.name, "iid"),
            ("algorithm.sampling", algorithm.sampling.name, "uniform"),
            ("algorithm.aggregator", algorithm.aggregator.name, "mean"),
            ("algorithm.server", algorithm.server.name, "sgd"),
            ("algorithm.server.lr", algorithm.server.lr, 1.0),
            ("algorithm.proximal", algorithm.proximal, 0.0),
            ("algorithm.scaffold", algorithm.scaffold, False),
        ]
        if value != unused
    ]


@cache
def _plain_keys() -> list[tuple[str, Callable[[Config], Any], Parameter]]:
    """The section of every key that is not a row's, how to read it, and its range."""
    return [(key.rpartition(".")[0], attrgetter(key), one) for key, one in parameters().items()]


def _optimizer_checks(config: Config) -> list[tuple[bool, str]]:
    optimizer, algorithm = config.train.optimizer, config.algorithm
    counts_steps = client_optimizer[optimizer.name].traits.get("effective_steps", False)
    row = aggregator[algorithm.aggregator.name]
    needs = "algorithm.scaffold=true" if algorithm.scaffold else ""
    if correction[algorithm.correction.name].traits.get("needs_effective_steps"):
        needs = f"algorithm.correction={algorithm.correction.name}"
    if row.traits.get("needs_effective_steps"):
        needs = f"algorithm.aggregator={row.name}"
    return [
        (
            not optimizer.get("nesterov") or optimizer.momentum > 0,
            "train.optimizer.nesterov=true needs train.optimizer.momentum > 0",
        ),
        (
            counts_steps or not needs,
            f"{needs} needs to know how far a gradient moves a client, which is not defined for "
            f"train.optimizer={optimizer.name}: use train.optimizer=sgd",
        ),
    ]


def _suits_frozen_blocks(part: str) -> bool:
    """Whether that part can be trained in the blocks after `backbone.freeze_blocks` alone."""
    traits = trainable[part].traits
    return part != "last_blocks" and not (traits.get("head_only") or traits.get("linearised"))


def _trainable_checks(config: Config) -> list[tuple[bool, str]]:
    """Of LoRA, linearised fine-tuning, and BatchNorm's statistics."""
    chosen, algorithm = config.train.trainable, config.algorithm
    traits = trainable[chosen.name].traits
    mode, federated = config.backbone.batch_norm, config.federated.clients is not None
    exact = federated and chosen.get("average") == "products"
    plain = ("mean", "sgd", 1.0)
    merges = aggregator[algorithm.aggregator.name].traits
    whole = federated and bool({"needs", "matrices"} & merges.keys())
    averages = (algorithm.aggregator.name, algorithm.server.name, algorithm.server.lr) == plain
    corrects = algorithm.correction.name
    of_correction = correction[corrects].traits
    return [
        (
            averages or not of_correction.get("moves_model"),
            f"algorithm.correction={corrects} computes the global model from the clients' mean: "
            "use algorithm.aggregator=mean and algorithm.server=sgd with learning rate 1",
        ),
        (
            not exact or not of_correction.get("moves_model"),
            f"train.trainable.average=products is an exact mean, which algorithm.correction="
            f"{corrects} moves on: use train.trainable.average=frozen_a",
        ),
        (
            mode != "local" or not of_correction.get("client_states"),
            f"backbone.batch_norm=local and algorithm.correction={corrects} both keep client "
            "states: choose one",
        ),
        (
            not whole or traits.get("whole_weights", True),
            f"algorithm.aggregator={algorithm.aggregator.name} merges a model's own weights, and "
            f"train.trainable={chosen.name} trains others: choose another of the two",
        ),
        (
            not exact or averages,
            "train.trainable.average=products is an exact mean: use algorithm.aggregator=mean and "
            "algorithm.server=sgd with learning rate 1",
        ),
        (
            not exact or not config.privacy.on,
            "train.trainable.average=products needs every client's own factors, which privacy "
            "hides: use train.trainable.average=frozen_a",
        ),
        (
            not traits.get("linearised") or mode in ("auto", "frozen"),
            "linearised fine-tuning expands a fixed function: use backbone.batch_norm=frozen",
        ),
        (
            mode != "local" or federated,
            "backbone.batch_norm=local is about clients: set federated.clients",
        ),
        (
            mode != "local" or config.engine.name not in FLOWER,
            f"backbone.batch_norm=local keeps layers in the run's folder, so engine="
            f"{config.engine.name} cannot be used: choose serial, parallel or auto",
        ),
        (
            mode != "local" or not algorithm.scaffold,
            "backbone.batch_norm=local and algorithm.scaffold=true both keep client states: "
            "choose one",
        ),
        (
            not config.privacy.on or batch_norm(config) == "frozen",
            "privacy covers trained weights only: set backbone.batch_norm=frozen",
        ),
    ]


def _sparse_checks(config: Config) -> list[tuple[bool, str]]:
    sparse, part = config.sparse, trainable[config.train.trainable.name]
    scored = sparse.density is not None and mask_rule[sparse.rule.name].traits.get(
        "sensitivity", True
    )
    by_clients = sparse.source == "clients"
    return [
        (
            sparse.density is None or not head_only(config),
            f"sparse.density masks the backbone, which train.trainable={part.name} leaves as it is",
        ),
        (
            sparse.density is None or part.traits.get("masks", True),
            f"sparse.density masks weights, and train.trainable={part.name} trains another part: "
            "leave one of them out",
        ),
        (
            by_clients or sparse.voting is None,
            "sparse.voting is among clients: set sparse.source=clients",
        ),
        (
            by_clients or sparse.clients is None,
            "sparse.clients says how many calibrate: set sparse.source=clients",
        ),
        (
            by_clients or not scored or config.data.validation > 0,
            "data.validation=0 leaves nothing to calibrate on: set sparse.source=clients",
        ),
        (
            not by_clients or not scored or config.federated.clients is not None,
            "sparse.source=clients needs clients: set federated.clients",
        ),
        (
            config.federated.clients is None
            or sparse.clients is None
            or sparse.clients <= config.federated.clients,
            f"sparse.clients={sparse.clients} are more than there are",
        ),
    ]


def _federated_checks(config: Config) -> list[tuple[bool, str]]:
    federated, algorithm, engine = config.federated, config.algorithm, config.engine
    least, rounds = federated.min_local_steps, federated.rounds
    corrects = algorithm.correction.name
    divides = (federated.clients or 0) % cohort_size(federated) == 0
    return [
        (
            least is None or least <= federated.local_steps,
            f"federated.min_local_steps={least} must lie between 1 and federated.local_steps="
            f"{federated.local_steps}",
        ),
        (
            rounds == "auto" or isinstance(rounds, int),
            f"federated.rounds={shown(rounds)} must be auto, or 0 or more",
        ),
        (
            algorithm.sampling.name not in ("cyclic", "chain") or divides,
            f"algorithm.sampling={algorithm.sampling.name} needs cohorts of equal size that add up "
            "to all clients: change federated.participation or federated.clients",
        ),
        (
            not (algorithm.scaffold and corrects != "none"),
            f"algorithm.scaffold=true corrects gradients already: leave it or algorithm.correction="
            f"{corrects} out",
        ),
        (
            corrects != "feddyn" or not algorithm.proximal,
            "algorithm.correction=feddyn has a proximal term of its own: leave algorithm.proximal "
            "out",
        ),
        (
            corrects == "none" or federated.clients is not None,
            f"algorithm.correction={corrects} is about clients: set federated.clients",
        ),
        (
            algorithm.average.name == "none" or federated.clients is not None,
            f"algorithm.average={algorithm.average.name} averages rounds' global models: set "
            "federated.clients",
        ),
        (
            algorithm.statistics_examples == AlgorithmConfig.statistics_examples
            or bool(_needed_statistic(config)),
            f"algorithm.statistics_examples is not read by algorithm.aggregator="
            f"{algorithm.aggregator.name}: leave it out",
        ),
        (
            engine.name != "flower" or config.data.validation > 0,
            "data.validation=0 leaves the server of engine=flower nothing to evaluate on",
        ),
        (
            engine.name not in FLOWER or federated.clients is not None,
            f"engine={engine.name} needs clients: set federated.clients",
        ),
    ]


def _refit_checks(config: Config) -> list[tuple[bool, str]]:
    """Of a head that is solved again during training."""
    head, row, every = config.head, heads[config.head.name], config.federated.refit_head
    examples = config.federated.refit_examples
    if not head_changes(config):
        return [
            (
                examples is None,
                f"federated.refit_examples={examples} is for a head that is solved again: set "
                "federated.refit_head",
            )
        ]
    solved = row.traits.get("fitted", True) and row.traits.get("by", "statistics") == "statistics"
    fewer = f"head.train_layers={head.train_layers}"
    where = fewer if every is None else f"federated.refit_head={every}"
    return [
        (
            head.train_layers is None or head.train_layers < head.layers,
            f"{fewer} must be less than head.layers={head.layers}, the blocks that the head reads "
            "after training",
        ),
        (
            head.train_layers is None or head.random_features is None,
            f"{fewer} reads a part of the tokens, and head.random_features mixes all of them: "
            "leave one of them out",
        ),
        (
            head.train_layers is None or config.train.early_stopping is None,
            f"{fewer} solves the head after the last round, and train.early_stopping may end "
            "before it: leave one of them out",
        ),
        (solved, f"{where} solves a head in closed form, and head={head.name} is none: use ridge"),
        (head.freeze, f"{where} replaces the head, so it cannot be trained: set head.freeze=true"),
        (config.federated.clients is not None, f"{where} counts rounds: set federated.clients"),
        (
            not head_only(config),
            f"{where} is for a backbone that moves, and train.trainable=head trains none of it",
        ),
        (
            not config.privacy.on,
            f"{where} sends exact sums of features after the rounds have begun: use it without "
            "privacy",
        ),
        (
            config.engine.name not in FLOWER,
            f"{where} needs clients in this process: use engine=serial, parallel or auto",
        ),
    ]


def _chain_checks(config: Config) -> list[tuple[bool, str]]:
    """Of clients that train one after another, each from where the last stopped."""
    algorithm, chained, chosen = config.algorithm, sequential(config), config.algorithm.sampling
    along = algorithm.carry_momentum or algorithm.proximal_to == "round"
    count, size = chosen.get("chains", 1), cohort_size(config.federated)
    optimizer = config.train.optimizer
    where = f"algorithm.sampling={chosen.name}"
    return [
        (
            chosen.name != "chain" or size % count == 0,
            f"algorithm.sampling.chains={count} does not divide the {size} clients of a round: "
            "change it, or federated.participation",
        ),
        (
            not chained or algorithm.correction.name == "none",
            f"algorithm.correction={algorithm.correction.name} corrects clients that all start "
            f"from the global model, and with {where} each starts where the last stopped: choose "
            "one",
        ),
        (
            chosen.get("order") != "opposite" or not algorithm.scaffold,
            "algorithm.sampling.order=opposite visits every client twice in a round, and "
            "algorithm.scaffold=true keeps one control variate of each: leave one of them out",
        ),
        (
            not (algorithm.scaffold and algorithm.carry_momentum),
            "algorithm.scaffold=true derives a client's gradients from how far it moved, and with "
            "algorithm.carry_momentum=true the clients before it moved it too: leave one of them "
            "out",
        ),
        (
            algorithm.scaffold or not algorithm.measure_controls,
            "algorithm.measure_controls=true measures control variates: set "
            "algorithm.scaffold=true",
        ),
        (
            not (chained and config.backbone.batch_norm == "local"),
            "backbone.batch_norm=local keeps layers of each client from the model that a chain "
            f"passes on: choose another mode, or do without {where}",
        ),
        (
            not (chained and _needed_statistic(config)),
            f"algorithm.aggregator={algorithm.aggregator.name} needs statistics of each client's "
            f"own model, and with {where} several clients have one: choose another of the two",
        ),
        (
            not (chained and config.privacy.secure),
            f"privacy.secure=true adds up the updates of many clients at once, and with {where} "
            "they train one after another: choose one",
        ),
        (
            chosen.get("order") != "opposite" or not config.federated.keep_updates,
            "algorithm.sampling.order=opposite visits every client twice, and "
            "federated.keep_updates keeps one update of each: leave one of them out",
        ),
        (
            chained or not along,
            "algorithm.carry_momentum=true and algorithm.proximal_to=round are for chains: set "
            "algorithm.sampling=chain",
        ),
        (
            not algorithm.carry_momentum
            or (optimizer.name == "sgd" and optimizer.get("momentum", 0) > 0),
            "algorithm.carry_momentum=true needs momentum to pass on: use train.optimizer=sgd with "
            "train.optimizer.momentum > 0",
        ),
        (
            algorithm.proximal_to == "start" or algorithm.proximal > 0,
            "algorithm.proximal_to=round says where FedProx's term pulls to: set "
            "algorithm.proximal",
        ),
        (
            not (along and config.privacy.on),
            "algorithm.carry_momentum=true and algorithm.proximal_to=round send more than the "
            "update that privacy protects: leave them out",
        ),
    ]


def _privacy_checks(config: Config) -> list[tuple[bool, str]]:
    privacy, algorithm = config.privacy, config.algorithm
    cohort = round(config.federated.participation * (config.federated.clients or 0), 9)
    averages = algorithm.aggregator.name == "mean"
    return [
        (
            not privacy.on or config.engine.name in FLOWER,
            "privacy goes through Flower: set engine=flower_simulation or engine=flower",
        ),
        (
            not (privacy.secure and privacy.name == "local"),
            "privacy.name=local adds more noise than secure aggregation can represent: use "
            "privacy.name=central with privacy.secure=true",
        ),
        (
            not privacy.on or config.head.name != "trained",
            "privacy covers the rounds only, and head=trained sends updates before them",
        ),
        (
            not privacy.on or not algorithm.scaffold,
            "SCAFFOLD's control variates reveal each client's update: use it without privacy",
        ),
        (
            not privacy.on or algorithm.correction.name == "none",
            f"algorithm.correction={algorithm.correction.name} sends tensors beside the "
            "parameters, which Flower's privacy modules do not take: use it without privacy",
        ),
        (
            privacy.name != "central" or algorithm.sampling.name == "uniform",
            "privacy.name=central needs uniformly drawn cohorts, not algorithm.sampling="
            f"{algorithm.sampling.name}",
        ),
        (
            averages or not (privacy.secure or privacy.name == "central"),
            f"privacy.name=central and privacy.secure=true need a mean of updates, not "
            f"algorithm.aggregator={algorithm.aggregator.name}",
        ),
        (
            not (privacy.on and _needed_statistic(config)),
            f"algorithm.aggregator={algorithm.aggregator.name} needs statistics of each client's "
            "data, which privacy does not protect: use it without privacy",
        ),
        (
            not privacy.secure or not config.federated.keep_updates,
            "privacy.secure=true hides each client's update: leave federated.keep_updates out",
        ),
        (
            not privacy.secure or FEWEST_SECURE - 1 < cohort <= MOST_SECURE,  # it is rounded up
            f"privacy.secure=true needs from {FEWEST_SECURE} to {MOST_SECURE} clients in each "
            "round: change federated.participation or federated.clients",
        ),
    ]


def _needed_statistic(config: Config) -> str | None:
    """What clients send beside their updates, for the aggregator."""
    needs: str | None = aggregator[config.algorithm.aggregator.name].traits.get("needs")
    return needs
