"""What a config may say: names that exist, numbers in range, choices that go together. No torch.

The impossible is refused in one sentence that names the key, before anything loads.
"""

import math
import re

from fedlens.config.schema import Config, cohort_size, trained_part
from fedlens.errors import FedlensError, suggest
from fedlens.training.schedules import SHAPES

DATASETS = ("cifar100", "synthetic")
HEADS = ("linear", "trained", "ridge", "class_means")
PRECISIONS = ("fp32", "amp")
TRACKERS = ("none", "tensorboard", "wandb")
PARTITIONS = ("iid", "classes", "dirichlet", "quantity")
MERGES = ("task_arithmetic", "ties", "dare", "breadcrumbs", "consensus")
AGGREGATORS = ("mean", "clipped_mean", "normalised_mean", "median", "trimmed_mean", *MERGES)
SERVERS = ("average", "momentum", "adam", "yogi")
RULES = ("least_sensitive", "most_sensitive", "lowest_magnitude", "highest_magnitude", "random")
SCOPES = ("global", "tensor")
METHODS = ("talos", "mean")
LABELS = ("sampled", "data", "expected")
TARGETS = ("logit", "log_prob")
VOTES = ("union", "majority", "intersection")
FLOWER = ("flower_simulation", "flower")
ENGINES = ("serial", "parallel", "auto", *FLOWER)
DEVICES = ("auto", "cpu", "cuda", "mps")
FEWEST_SECURE, MOST_SECURE = 3, 1023  # clients whose updates secure aggregation can add


def validate(config: Config) -> None:
    """Refuses the impossible in one sentence that names the key."""
    for key, value, options in [
        ("data", config.data.name, DATASETS),
        ("head", config.head.name, HEADS),
        ("train.schedule.name", config.train.schedule.name, SHAPES),
        ("train.precision", config.train.precision, PRECISIONS),
        ("tracker", config.tracker.name, TRACKERS),
        ("tracker.mode", config.tracker.mode, ("online", "offline")),
        ("evaluate.select", config.evaluate.select, ("best", "last")),
        ("partition", config.partition.name, PARTITIONS),
        ("algorithm.cohorts", config.algorithm.cohorts, ("chance", "turns")),
        ("algorithm.aggregator", config.algorithm.aggregator, AGGREGATORS),
        ("algorithm.server", config.algorithm.server, SERVERS),
        ("sparse.rule", config.sparse.rule, RULES),
        ("sparse.scope", config.sparse.scope, SCOPES),
        ("sparse.method", config.sparse.method, METHODS),
        ("sparse.labels", config.sparse.labels, LABELS),
        ("sparse.target", config.sparse.target, TARGETS),
        ("sparse.source", config.sparse.source, ("validation", "clients")),
        ("sparse.voting", config.sparse.voting or VOTES[0], VOTES),
        ("engine", config.engine.name, ENGINES),
        ("privacy.name", config.privacy.name, ("none", "central", "local")),
        ("device", re.sub(r"^cuda:\d+$", "cuda", config.device), DEVICES),
    ]:
        if value not in options:
            raise FedlensError(f"{key}={value} is unknown: {suggest(value, options)}")
    mode, blocks = trained_part(config.train.what)
    data, train, head = config.data, config.train, config.head
    selects = config.evaluate.select == "best" or train.early_stopping is not None
    chooses = head.name in ("ridge", "class_means") and (
        head.temperature is None or (head.name == "ridge" and head.ridge_lambda is None)
    )
    for fine, complaint in [
        (config.seed >= 0, f"seed={config.seed} must be 0 or more"),
        (config.threads is None or config.threads > 0, "threads must be at least 1"),
        (0 <= data.validation < 1, f"data.validation={data.validation} must lie in [0, 1)"),
        (
            data.validation > 0 or not selects,
            "data.validation=0 leaves nothing to select on: set evaluate.select=last and no "
            "train.early_stopping",
        ),
        (
            data.validation > 0 or not chooses,
            f"data.validation=0 leaves nothing to fit the {head.name} head's free numbers on: set "
            "head.temperature (and head.ridge_lambda)",
        ),
        (_positive(data.train_per_class), "data.train_per_class must be at least 1"),
        (_positive(data.test_per_class), "data.test_per_class must be at least 1"),
        (train.epochs >= 0, f"train.epochs={train.epochs} must be 0 or more"),
        (_positive(train.epoch_steps), "train.epoch_steps must be at least 1"),
        (train.batch_size > 0, f"train.batch_size={train.batch_size} must be at least 1"),
        (_positive(train.micro_batch), "train.micro_batch must be at least 1"),
        (0 < train.lr < math.inf, f"train.lr={train.lr} must be positive and finite"),
        (0 <= train.momentum < 1, f"train.momentum={train.momentum} must lie in [0, 1)"),
        (train.weight_decay >= 0, f"train.weight_decay={train.weight_decay} must not be negative"),
        (not train.nesterov or train.momentum > 0, "train.nesterov=true needs train.momentum > 0"),
        (0 <= train.label_smoothing < 1, "train.label_smoothing must lie in [0, 1)"),
        (_positive(train.clip_norm), "train.clip_norm must be positive"),
        (_positive(train.early_stopping), "train.early_stopping must be at least 1"),
        (
            0 <= train.schedule.warmup < 1,
            "train.schedule.warmup is a fraction of the steps below 1",
        ),
        (0 <= train.schedule.floor <= 1, "train.schedule.floor must lie in [0, 1]"),
        (0 < train.schedule.gamma <= 1, "train.schedule.gamma must lie in (0, 1]"),
        (train.schedule.stages > 0, "train.schedule.stages must be at least 1"),
        (0 <= head.dropout < 1, f"head.dropout={head.dropout} must lie in [0, 1)"),
        (_positive(head.temperature), "head.temperature must be positive"),
        (_positive(head.ridge_lambda), "head.ridge_lambda must be positive"),
        (0 < head.lr < math.inf, "head.lr must be positive and finite"),
        (head.steps > 0, "head.steps must be at least 1"),
        (
            not (head.freeze and mode == "head" and head.name == "linear"),
            "head.freeze=true with train.what=head leaves nothing to train",
        ),
        (mode != "last_blocks" or blocks > 0, "train.what=last_blocks:N needs N of at least 1"),
        (
            config.backbone.pretrained or not (config.backbone.weights or config.backbone.sha256),
            "backbone.pretrained=false takes no file: leave backbone.weights and sha256 out",
        ),
        (
            config.run.name is None or re.fullmatch(r"[\w.+=-]*\w", config.run.name) is not None,
            f"run.name={config.run.name} must be one plain folder name",
        ),
        (config.backbone.freeze_blocks >= 0, "backbone.freeze_blocks must be 0 or more"),
        (
            config.backbone.freeze_blocks == 0 or mode == "full",
            f"backbone.freeze_blocks goes with train.what=full, not with {train.what}",
        ),
        (_positive(config.backbone.resolution), "backbone.resolution must be positive"),
        (config.augment.crop_padding >= 0, "augment.crop_padding must be 0 or more"),
        (0 <= config.augment.colour_jitter <= 1, "augment.colour_jitter must lie in [0, 1]"),
        (config.augment.randaugment >= 0, "augment.randaugment must be 0 or more"),
        (0 <= config.augment.magnitude <= 30, "augment.magnitude must lie in [0, 30]"),
        (config.evaluate.every > 0, "evaluate.every must be at least 1"),
        (
            config.evaluate.test or not config.evaluate.test_curve,
            "evaluate.test=false never opens the test split: leave evaluate.test_curve out",
        ),
        (config.evaluate.batch_size > 0, "evaluate.batch_size must be at least 1"),
        (config.checkpoint.every > 0, "checkpoint.every must be at least 1"),
        (config.checkpoint.minutes > 0, "checkpoint.minutes must be positive"),
        (config.checkpoint.keep_best > 0, "checkpoint.keep_best must be at least 1"),
        (config.checkpoint.keep_last > 0, "checkpoint.keep_last must be at least 1"),
        *_sparse_checks(config),
        *_federated_checks(config),
        *_privacy_checks(config),
    ]:
        if not fine:
            raise FedlensError(f"{complaint}.")


def _sparse_checks(config: Config) -> list[tuple[bool, str]]:
    sparse, mode = config.sparse, trained_part(config.train.what)[0]
    scored = sparse.density is not None and sparse.rule.endswith("_sensitive")
    by_clients = sparse.source == "clients"
    return [
        (
            sparse.density is None or 0 < sparse.density <= 1,
            f"sparse.density={sparse.density} must lie in (0, 1]: it is the fraction trained",
        ),
        (
            sparse.density is None or mode != "head",
            "sparse.density masks the backbone, which train.what=head leaves as it is",
        ),
        (sparse.rounds > 0, "sparse.rounds must be at least 1"),
        (0 <= sparse.soft <= 1, "sparse.soft must lie in [0, 1]"),
        (_positive(sparse.examples), "sparse.examples must be at least 1"),
        (sparse.passes > 0, "sparse.passes must be at least 1"),
        (sparse.micro_batch > 0, "sparse.micro_batch must be at least 1"),
        (_positive(sparse.clients), "sparse.clients must be at least 1"),
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
    federated, partition, algorithm = config.federated, config.partition, config.algorithm
    engine, told, merge = config.engine, config.federated.rounds, algorithm.merge
    fewest, share = federated.fewest_local_steps, federated.participation
    even = not 0 < share <= 1 or (federated.clients or 0) % cohort_size(federated) == 0
    return [
        (_positive(federated.clients), "federated.clients must be at least 1"),
        (0 < share <= 1, "federated.participation must lie in (0, 1]"),
        (federated.local_steps > 0, "federated.local_steps must be at least 1"),
        (
            fewest is None or 1 <= fewest <= federated.local_steps,
            "federated.fewest_local_steps must lie between 1 and federated.local_steps",
        ),
        (
            told == "auto" or (isinstance(told, int) and told >= 0),
            f"federated.rounds={told} must be auto, or 0 or more",
        ),
        (federated.local_step_budget > 0, "federated.local_step_budget must be at least 1"),
        (0 <= federated.dropout < 1, "federated.dropout must lie in [0, 1)"),
        (
            algorithm.cohorts == "chance" or even,
            "algorithm.cohorts=turns needs rounds of equally many clients that add up to all: "
            "change federated.participation or federated.clients",
        ),
        (partition.classes_per_client > 0, "partition.classes_per_client must be at least 1"),
        (0 < partition.alpha < math.inf, "partition.alpha must be positive and finite"),
        (0 <= partition.sigma < math.inf, "partition.sigma must be 0 or more, and finite"),
        (partition.min_size > 0, "partition.min_size must be at least 1"),
        (algorithm.proximal >= 0, "algorithm.proximal must not be negative"),
        (0 <= algorithm.trim < 0.5, "algorithm.trim must lie in [0, 0.5)"),
        (algorithm.clip_norm > 0, "algorithm.clip_norm must be positive"),
        (0 < algorithm.server_lr < math.inf, "algorithm.server_lr must be positive and finite"),
        (0 <= algorithm.server_momentum < 1, "algorithm.server_momentum must lie in [0, 1)"),
        (0 <= algorithm.server_beta2 < 1, "algorithm.server_beta2 must lie in [0, 1)"),
        (algorithm.server_tau > 0, "algorithm.server_tau must be positive"),
        (0 < merge.scale < math.inf, "algorithm.merge.scale must be positive and finite"),
        (0 < merge.density <= 1, "algorithm.merge.density must lie in (0, 1]"),
        (0 <= merge.outliers < 1, "algorithm.merge.outliers must lie in [0, 1)"),
        (merge.agreement > 0, "algorithm.merge.agreement must be at least 1"),
        (0 <= merge.threshold < math.inf, "algorithm.merge.threshold must not be negative"),
        (federated.keep_updates >= 0, "federated.keep_updates must be 0 or more"),
        (_positive(engine.workers), "engine.workers must be at least 1"),
        (_positive(engine.threads_per_client), "engine.threads_per_client must be at least 1"),
        (
            engine.name != "flower" or config.data.validation > 0,
            "data.validation=0 leaves the server of engine=flower nothing to evaluate on",
        ),
        (0 < engine.deadline < math.inf, "engine.deadline must be positive and finite"),
        (
            engine.name not in FLOWER or federated.clients is not None,
            f"engine={engine.name} needs clients: set federated.clients",
        ),
    ]


def _privacy_checks(config: Config) -> list[tuple[bool, str]]:
    told, algorithm = config.privacy, config.algorithm
    cohort = round(config.federated.participation * (config.federated.clients or 0), 9)
    averages = algorithm.aggregator == "mean"
    return [
        (0 < told.clip_norm < math.inf, "privacy.clip_norm must be positive and finite"),
        (
            0 < told.noise_multiplier < math.inf,
            "privacy.noise_multiplier must be positive and finite",
        ),
        (0 < told.epsilon < 1, "privacy.epsilon, of one release, must lie between 0 and 1"),
        (0 < told.delta < 1, "privacy.delta must lie between 0 and 1"),
        (0 < told.reach < math.inf, "privacy.reach must be positive and finite"),
        (
            not told.on or config.engine.name in FLOWER,
            "privacy goes through Flower: set engine=flower_simulation or engine=flower",
        ),
        (
            not (told.secure and told.name == "local"),
            "privacy.name=local noises an update so much that it fits into no secure sum: take "
            "privacy.name=central with privacy.secure=true",
        ),
        (
            not told.on or config.head.name != "trained",
            "privacy is that of the rounds, and head=trained learns before them",
        ),
        (
            not told.on or not algorithm.scaffold,
            "SCAFFOLD's controls tell each client's update: privacy does not go with it",
        ),
        (
            told.name != "central" or algorithm.cohorts == "chance",
            "privacy.name=central counts on cohorts drawn by chance, not on algorithm.cohorts="
            f"{algorithm.cohorts}",
        ),
        (
            averages or not (told.secure or told.name == "central"),
            f"privacy.name=central and privacy.secure=true are about means of updates, not about "
            f"algorithm.aggregator={algorithm.aggregator}",
        ),
        (
            not told.secure or not config.federated.keep_updates,
            "privacy.secure=true shows no client's update: leave federated.keep_updates out",
        ),
        (
            not told.secure or FEWEST_SECURE - 1 < cohort <= MOST_SECURE,  # it is rounded up
            f"privacy.secure=true needs from {FEWEST_SECURE} to {MOST_SECURE} clients in each "
            "round: change federated.participation or federated.clients",
        ),
    ]


def _positive(value: float | None) -> bool:
    return value is None or value > 0
