"""Every config key with its range, as dataclasses: the schema behind the YAML presets. No torch.

Keys typed `Any` name a row of the registry, which knows its own parameters; `checks.py` has what
the values of several keys must satisfy together. An integer is at most 10⁹ unless its range says
otherwise.
"""

import math
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, cast, get_type_hints

from fedlens.registry import (
    REGISTRIES,
    Parameter,
    Pattern,
    Range,
    parameter_of,
    sampling,
    trainable,
)
from fedlens.training.schedules import Schedule

Count = Annotated[int, Range("[1, inf)")]
WholeNumber = Annotated[int, Range("[0, inf)")]
BatchSize = Annotated[int, Range("[1, 1000000]")]
Positive = Annotated[float, Range("(0, inf)")]
NotNegative = Annotated[float, Range("[0, inf)")]
Fraction = Annotated[float, Range("[0, 1]")]
PositiveFraction = Annotated[float, Range("(0, 1]")]
FractionBelow1 = Annotated[float, Range("[0, 1)")]
Probability = Annotated[float, Range("(0, 1)")]

# The folder of a run or a search; runs and temporary files append a few letters to it.
FOLDER_NAME = Pattern(
    r"(?![.-])[\w.=+-]*\w",
    "one plain folder name: letters, digits and ._=+-, the first not . or -, the last a letter or "
    "digit",
    longest=200,
)


@dataclass
class AugmentConfig:
    crop_padding: Annotated[int, Range("[0, 4096]")] = 0
    flip: bool = False
    colour_jitter: Fraction = 0.0
    randaugment: Annotated[int, Range("[0, 100]")] = 0  # number of operations; 0 is off
    magnitude: Annotated[int, Range("[0, 30]")] = 9


@dataclass
class TrainConfig:
    trainable: Any = "full"  # which part of the backbone is trained, besides the head
    epochs: WholeNumber = 10
    steps_per_epoch: Count | None = None  # null: as many as it takes to see every image once
    batch_size: BatchSize = 64
    micro_batch: BatchSize | None = None
    lr: Positive = 1e-3
    optimizer: Any = "sgd"  # of central training and of every client
    schedule: Schedule = field(default_factory=Schedule)
    label_smoothing: FractionBelow1 = 0.0
    clip_norm: Positive | None = None
    early_stopping: Count | None = None  # evaluations without a better validation accuracy
    precision: str = "fp32"  # fp32 | amp
    compile: bool = False
    prefix_cache_gb: Annotated[float, Range("[0, 1e6]")] = 20.0  # the largest cache of frozen
    # blocks' activations; 0: none


@dataclass
class SparseConfig:
    """Which weights are trained; `density` is the fraction, sparsity is 1 − density."""

    density: PositiveFraction | None = None  # null: every weight
    rule: Any = "least_sensitive"  # which weights are trained
    scope: str = "global"  # rank all weights together, or each tensor by itself: global | tensor
    biases: bool = False  # maskable besides the backbone's weights
    norms: bool = False
    embeddings: bool = False  # class token, registers, position embeddings
    method: str = "talos"  # talos: shrink in rounds | mean: average the scores of the rounds
    rounds: Count = 4
    shrink_factor: Fraction = 0.1  # of talos: dropped weights are multiplied by it while
    # calibrating
    labels: str = "sampled"  # sampled | data | expected
    target: str = "logit"  # logit | log_prob
    source: str = "validation"  # validation | clients
    voting: str | None = None  # of clients: union | majority | intersection; null: scores add up
    clients: Count | None = None  # of clients: how many of them calibrate; null: all
    examples: Count | None = None  # of the validation split, or of each client; null: all
    passes: Count = 1  # over the examples, in each round
    micro_batch: BatchSize = 64


@dataclass
class FederatedConfig:
    clients: Count | None = None  # null: no clients, central training on pooled data
    participation: PositiveFraction = 0.1  # of the clients, in each round
    local_steps: Count = 4
    min_local_steps: Count | None = None  # stragglers: steps are drawn from here to local_steps
    rounds: WholeNumber | str = "auto"  # auto: as many as keep local_steps × rounds at the budget
    local_step_budget: Count = 2000
    dropout: FractionBelow1 = 0.0  # probability that a sampled client does not answer
    refit_head: Count | None = None  # rounds after which a closed-form head is solved again
    refit_examples: Count | None = None  # of each client, but after the last round; null: all
    fail_on_bad_update: bool = False  # else it is left out, counted and logged
    keep_updates: WholeNumber = 0  # rounds, the last ones, whose client updates are kept on disk
    diagnostics: list[str] = field(  # measured in every round
        default_factory=lambda: ["update_norms", "drift", "cosine", "sign_agreement"]
    )


@dataclass
class AlgorithmConfig:
    sampling: Any = "uniform"  # who takes part in a round
    proximal: NotNegative = 0.0  # μ of FedProx
    proximal_to: str = "start"  # of a chain: each client's own start, or the round's: start | round
    carry_momentum: bool = False  # of a chain: momentum passes from client to client
    scaffold: bool = False  # control variates
    measure_controls: bool = False  # of scaffold: by one step of every client, not 0
    correction: Any = "none"  # a term in clients' gradients, from what the server remembers
    aggregator: Any = "mean"  # how client updates become one change of the global model
    server: Any = "sgd"  # how the server applies that change
    average: Any = "none"  # of the global models of several rounds: evaluated in their place
    statistics_examples: Count | None = 256  # of a client, for regmean and fisher_average; null:
    # all


@dataclass
class PrivacyConfig:
    """What clients' updates are protected by; through Flower's modules, so with its engines."""

    name: str = "none"  # none | central | local: whose noise
    clip_norm: Positive = 1.0  # updates longer than this are shortened to it
    noise_multiplier: Positive = 1.0  # of central: noise on the sum of updates, in units of
    # clip_norm
    epsilon: Probability = 0.5  # of local: of one release
    delta: Probability = 1e-5
    secure: bool = False  # secure aggregation: the server sees sums of updates only
    max_update_value: Positive = 0.1  # of secure: no value of an update may be larger

    @property
    def on(self) -> bool:
        return self.secure or self.name != "none"


@dataclass
class EvaluateConfig:
    every: Count = 1  # epochs or rounds
    batch_size: BatchSize = 256
    select: str = "best"  # which parameters meet the test split: best on validation, or last
    test: bool = True  # false: the test split is never opened, as in a search of hyper-parameters
    test_curve: bool = False


@dataclass
class CheckpointConfig:
    every: Count = 1  # epochs or rounds
    minutes: Positive = 10.0  # and after so many minutes, within an epoch or between rounds
    keep_best: Count = 1
    keep_last: Count = 2


@dataclass
class RunConfig:
    root: str = "runs"
    name: Annotated[str, FOLDER_NAME] | None = None  # null: made from the config


@dataclass
class TrackerConfig:
    name: str = "none"
    project: str = "fedlens"
    mode: str = "offline"  # wandb: online | offline


@dataclass
class Config:
    experiment: str = "centralized"
    seed: Annotated[int, Range("[0, 9007199254740992]")] = 0
    device: str = "auto"
    threads: Annotated[int, Range("[1, 1024]")] | None = None  # CPU threads; null: torch's own
    # choice, then kept by the run
    onednn: bool | None = None  # linear layers by oneDNN instead of MKL, equal up to rounding;
    # null: if it is faster on this CPU, then kept by the run
    data: Any = "cifar100"
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    backbone: Any = "dino_vits16"
    head: Any = "linear"
    train: TrainConfig = field(default_factory=TrainConfig)
    sparse: SparseConfig = field(default_factory=SparseConfig)
    federated: FederatedConfig = field(default_factory=FederatedConfig)
    partition: Any = "iid"  # who holds which training example
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    engine: Any = "serial"  # who carries out the clients' work
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    run: RunConfig = field(default_factory=RunConfig)


# Keys that choose a row of the registry, by its name and parameters: {name: ties, density: 0.2}.
ROW_KEYS = {
    "data": "dataset",
    "backbone": "backbone",
    "head": "head",
    "train.trainable": "trainable",
    "train.optimizer": "client_optimizer",
    "sparse.rule": "mask_rule",
    "partition": "partitioner",
    "algorithm.sampling": "sampling",
    "algorithm.correction": "correction",
    "algorithm.aggregator": "aggregator",
    "algorithm.server": "server_optimizer",
    "algorithm.average": "model_average",
    "engine": "engine",
}

# A run caches the activations of frozen blocks only if it sees at least this fraction of the images
# that the file would hold. One pass would repay the run alone; less is enough, because other runs
# read the same file.
CACHED_PASSES = 0.5

# Keys that say where and how to run, not what to learn: they do not make it another run.
RUNTIME_KEYS = (
    "device", "threads", "onednn", "engine", "tracker", "run", "data.root", "checkpoint",
    "train.prefix_cache_gb",
)  # fmt: skip


def row_key(key: str) -> str | None:
    """The key of a row that `key` is or lies in."""
    return next((one for one in ROW_KEYS if key == one or key.startswith(f"{one}.")), None)


_hints = cache(get_type_hints)


def keys(schema: type = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema, groups included, and the parameters of all rows."""
    hints = _hints(schema)
    for entry in fields(schema):
        key = prefix + entry.name
        yield key
        if key in ROW_KEYS:
            names = {one.name for row in REGISTRIES[ROW_KEYS[key]] for one in row.parameters}
            yield from (f"{key}.{name}" for name in ("name", *sorted(names)))
        elif is_dataclass(kind := hints[entry.name]):
            assert isinstance(kind, type)
            yield from keys(kind, f"{key}.")


@cache
def parameters(schema: type = Config, prefix: str = "") -> dict[str, Parameter]:
    """Every dotted key that is neither a group nor a row's, with its type, default and range."""
    hints = get_type_hints(schema, include_extras=True)
    found: dict[str, Parameter] = {}
    for entry in fields(schema):
        key, kind = prefix + entry.name, hints[entry.name]
        if is_dataclass(kind):
            assert isinstance(kind, type)
            found |= parameters(kind, f"{key}.")
        elif key not in ROW_KEYS:
            make = entry.default_factory
            default = entry.default if make is MISSING else make()
            found[key] = parameter_of(entry.name, kind, default)
    return found


@cache
def switches() -> frozenset[str]:
    """The keys that are on or off."""
    return frozenset(key for key, one in parameters().items() if one.type is bool)


@cache
def sections(schema: type = Config, prefix: str = "") -> dict[str, type]:
    """The class of every dotted key that has keys of its own, outer ones first."""
    found: dict[str, type] = {}
    for name, kind in get_type_hints(schema).items():
        if is_dataclass(kind):
            assert isinstance(kind, type)
            found |= {prefix + name: kind, **sections(kind, f"{prefix}{name}.")}
    return found


def unit(config: Config) -> str:
    """What the run counts: a federated one rounds, a central one epochs."""
    return "epoch" if config.federated.clients is None else "round"


def rounds(config: Config) -> int:
    """As many as the config says, or as spend the budget of local steps."""
    if isinstance(config.federated.rounds, int):
        return config.federated.rounds
    return -(-config.federated.local_step_budget // config.federated.local_steps)


def cohort_size(federated: FederatedConfig) -> int:
    """⌈C·K⌉, at least one; the rounding error of a product like 0.07 · 100 is ignored."""
    return max(1, math.ceil(round(federated.participation * (federated.clients or 1), 9)))


def cycle(federated: FederatedConfig) -> int:
    """1/C: the rounds in which cyclic sampling visits every client once."""
    return -(-(federated.clients or 1) // cohort_size(federated))


def sequential(config: Config) -> bool:
    """Whether the clients of a round train one after another, in chains."""
    return bool(sampling[config.algorithm.sampling.name].traits.get("sequential"))


def visits(config: Config) -> int:
    """How many clients train in a round; two chains of opposite order visit each of them twice."""
    twice = config.algorithm.sampling.get("order") == "opposite"
    return cohort_size(config.federated) * (2 if twice else 1)


def batch_norm(config: Config) -> Literal["frozen", "averaged", "local"]:
    """What happens to the statistics of BatchNorm layers.

    `auto` keeps pretrained ones; under privacy it keeps all, since only weights are protected.
    """
    mode = config.backbone.batch_norm
    if mode == "auto":
        kept = config.backbone.pretrained or config.privacy.on
        return "frozen" if kept else "averaged"
    return cast(Literal["frozen", "averaged", "local"], mode)


def head_changes(config: Config) -> bool:
    """Whether a closed-form head is solved again during training, or after it."""
    return config.federated.refit_head is not None or config.head.train_layers is not None


def head_only(config: Config) -> bool:
    """Whether nothing of the backbone is trained."""
    return bool(trainable[config.train.trainable.name].traits.get("head_only", False))
