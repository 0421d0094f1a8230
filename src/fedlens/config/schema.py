"""What an experiment can say, as dataclasses: the schema behind the YAML groups.

Every key of every config is here; `validate.py` has the checks of their values. No torch.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import get_type_hints

from fedlens.errors import FedlensError, suggest
from fedlens.training.schedules import Schedule


@dataclass
class DataConfig:
    name: str = "cifar100"
    root: str | None = None  # folder that holds the files; else $FEDLENS_DATA, else the user cache
    validation: float = 0.1  # fraction of the training images, stratified
    train_per_class: int | None = None  # use only so many images of each class
    test_per_class: int | None = None


@dataclass
class AugmentConfig:
    crop_padding: int = 0
    flip: bool = False
    colour_jitter: float = 0.0
    randaugment: int = 0  # number of operations; 0 is off
    magnitude: int = 9


@dataclass
class BackboneConfig:
    name: str = "dino_vits16"
    resolution: int | None = None  # pixels; null: the backbone's own
    pretrained: bool = True
    weights: str | None = None  # a local file; else $FEDLENS_WEIGHTS, else cache or download
    sha256: str | None = None  # refuse a file with another hash
    freeze_blocks: int = 0  # first blocks and the embeddings


@dataclass
class HeadConfig:
    name: str = "linear"  # linear | trained | ridge | class_means
    freeze: bool = False  # keep the head as initialised while the backbone trains
    dropout: float = 0.0
    ridge_lambda: float | None = None  # null: chosen on validation
    temperature: float | None = None  # scale of closed-form logits; null: fitted on validation
    lr: float = 0.03  # of a trained head, which learns on frozen features before all else
    steps: int = 2000  # of a trained head; with clients, local steps × rounds


@dataclass
class TrainConfig:
    what: str = "full"  # head | full | last_blocks:N
    epochs: int = 10
    epoch_steps: int | None = None  # an epoch ends after so many steps; null: with the last image
    batch_size: int = 64
    micro_batch: int | None = None
    lr: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 0.0
    nesterov: bool = False
    schedule: Schedule = field(default_factory=Schedule)
    label_smoothing: float = 0.0
    clip_norm: float | None = None
    early_stopping: int | None = None  # evaluations without a better validation accuracy
    precision: str = "fp32"  # fp32 | amp
    compile: bool = False


@dataclass
class SparseConfig:
    """Which weights are trained; `density` is the fraction, sparsity is 1 − density."""

    density: float | None = None  # null: every weight
    rule: str = "least_sensitive"  # or most_sensitive, lowest_magnitude, highest_magnitude, random
    scope: str = "global"  # rank all weights together, or each tensor by itself: global | tensor
    biases: bool = False  # maskable besides the backbone's weights
    norms: bool = False
    embeddings: bool = False  # class token, registers, position embeddings
    method: str = "talos"  # talos: shrink in rounds | mean: average the scores of the rounds
    rounds: int = 4
    soft: float = 0.1  # of talos: what dropped weights are multiplied by while calibrating
    labels: str = "sampled"  # sampled | data | expected
    target: str = "logit"  # logit | log_prob
    source: str = "validation"  # validation | clients
    voting: str | None = None  # of clients: union | majority | intersection; null: scores add up
    clients: int | None = None  # of clients: how many of them calibrate; null: all
    examples: int | None = None  # of the validation split, or of each client; null: all
    passes: int = 1  # over the examples, in each round
    micro_batch: int = 64


@dataclass
class PartitionConfig:
    name: str = "iid"  # iid | classes | dirichlet | quantity
    classes_per_client: int = 10  # of classes
    alpha: float = 0.3  # of dirichlet: the smaller, the fewer classes a client has
    sigma: float = 1.0  # of quantity: the spread of log sizes
    min_size: int = 1  # of dirichlet and quantity: examples every client has at least


@dataclass
class FederatedConfig:
    clients: int | None = None  # null: no clients, central training on pooled data
    participation: float = 0.1  # of the clients, in each round
    local_steps: int = 4
    fewest_local_steps: int | None = None  # stragglers: steps are drawn from here to local_steps
    rounds: int | str = "auto"  # auto: as many as keep local_steps × rounds at the budget
    local_step_budget: int = 2000
    dropout: float = 0.0  # probability that a sampled client does not answer
    fail_on_bad_update: bool = False  # else it is left out, counted and logged
    keep_updates: int = 0  # rounds, the last ones, whose client updates are kept on disk


@dataclass
class MergeConfig:
    scale: float = 1.0  # λ on the merged vector
    density: float = 0.2  # of ties, dare, breadcrumbs: the share of entries that counts
    outliers: float = 0.01  # of breadcrumbs: the share of the largest that is cut off
    agreement: int = 2  # of consensus: an entry needs so many clients
    threshold: float = 0.4  # of consensus: when a client counts


@dataclass
class AlgorithmConfig:
    name: str = "fedavg"
    cohorts: str = "chance"  # who takes part: anybody; turns: nobody again before everybody did
    proximal: float = 0.0  # μ of FedProx
    scaffold: bool = False  # control variates
    aggregator: str = "mean"  # or clipped_mean, normalised_mean, median, trimmed_mean, or a merge:
    # task_arithmetic, ties, dare, breadcrumbs, consensus
    trim: float = 0.1  # of trimmed_mean: share of clients cut off at each end
    clip_norm: float = 1.0  # of clipped_mean
    server: str = "average"  # average | momentum | adam | yogi
    server_lr: float = 1.0
    server_momentum: float = 0.9  # of momentum; β₁ of adam and yogi
    server_beta2: float = 0.99  # of adam and yogi
    server_tau: float = 1e-3  # of adam and yogi: the smaller, the more adaptive
    merge: MergeConfig = field(default_factory=MergeConfig)  # of merges


@dataclass
class PrivacyConfig:
    """What clients' updates are protected by; through Flower's modules, so with its engines."""

    name: str = "none"  # none | central | local: whose noise
    clip_norm: float = 1.0  # updates longer than this are shortened to it
    noise_multiplier: float = 1.0  # of central: noise on the sum of updates, in units of clip_norm
    epsilon: float = 0.5  # of local: of one release, below 1
    delta: float = 1e-5
    secure: bool = False  # secure aggregation: the server sees sums of updates only
    reach: float = 0.1  # of secure: no value of an update may be larger

    @property
    def on(self) -> bool:
        return self.secure or self.name != "none"


@dataclass
class EngineConfig:
    name: str = "serial"  # serial | parallel | auto | flower_simulation | flower
    workers: int | None = None  # of parallel and flower_simulation; null: one per GPU, or core
    threads_per_client: int | None = None  # null: all of `threads` if serial, 1 if parallel
    vectorise: bool = True  # serial: heads on cached features train as one batched product
    deadline: float = 600.0  # of flower: seconds a round's clients have to answer
    federation: str = "federation"  # of flower: the folder that says where the SuperLink is


@dataclass
class EvaluateConfig:
    every: int = 1  # epochs or rounds
    batch_size: int = 256
    select: str = "best"  # which parameters meet the test split: best on validation, or last
    test: bool = True  # false: the test split is never opened, as in a search of hyper-parameters
    test_curve: bool = False


@dataclass
class CheckpointConfig:
    every: int = 1  # epochs or rounds
    minutes: float = 10.0  # and after so many minutes, within an epoch or between rounds
    keep_best: int = 1
    keep_last: int = 2


@dataclass
class RunConfig:
    root: str = "runs"
    name: str | None = None  # null: made from the config


@dataclass
class TrackerConfig:
    name: str = "none"
    project: str = "fedlens"
    mode: str = "offline"  # wandb: online | offline


@dataclass
class Config:
    experiment: str = "centralized"
    seed: int = 0
    device: str = "auto"
    threads: int | None = None  # CPU threads; null: torch's own choice, then kept by the run
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sparse: SparseConfig = field(default_factory=SparseConfig)
    federated: FederatedConfig = field(default_factory=FederatedConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    run: RunConfig = field(default_factory=RunConfig)


# Keys that say where and how to run, not what to learn: they do not make it another run.
CIRCUMSTANCES = ("device", "threads", "engine", "tracker", "run", "data.root", "checkpoint")


def keys(schema: type = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema, groups included."""
    hints = get_type_hints(schema)
    for entry in fields(schema):
        yield prefix + entry.name
        if is_dataclass(kind := hints[entry.name]):
            assert isinstance(kind, type)
            yield from keys(kind, f"{prefix}{entry.name}.")


def unit(config: Config) -> str:
    """What the run counts: a federated one rounds, a central one epochs."""
    return "epoch" if config.federated.clients is None else "round"


def rounds(config: Config) -> int:
    """As told, or as many as spend the budget of local steps."""
    told = config.federated.rounds
    if isinstance(told, int):
        return told
    return -(-config.federated.local_step_budget // config.federated.local_steps)


def cohort_size(told: FederatedConfig) -> int:
    """⌈C·K⌉, at least one; a product like 0.07 · 100 is not let up by its last bit."""
    return max(1, math.ceil(round(told.participation * (told.clients or 1), 9)))


def trained_part(what: str) -> tuple[str, int]:
    """('head' | 'full' | 'last_blocks', N) of `train.what`."""
    mode, _, count = what.partition(":")
    if (mode in ("head", "full") and not count) or (mode == "last_blocks" and count.isdigit()):
        return mode, int(count or 0)
    raise FedlensError(
        f"train.what={what} is not a mode: {suggest(what, ('head', 'full', 'last_blocks:N'))}"
    )
