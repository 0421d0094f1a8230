"""Federated algorithms for any `nn.Module`: a model, tensors, and a partition of them over clients.

Every function returns a `Federation`, whose rounds are those of `federated.rounds`.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Required, TypedDict, Unpack

import torch
from torch import nn

from fedlens import params
from fedlens.data.examples import Array, Examples, as_examples
from fedlens.data.partitions.partition import Partition
from fedlens.errors import FedlensError, suggest
from fedlens.federated.algorithms.choice import (
    MakeAggregator,
    make_aggregator,
    needed_statistic,
)
from fedlens.federated.algorithms.scaffold import SCAFFOLD
from fedlens.federated.chains import PROXIMAL_TO, ProximalTo
from fedlens.federated.client import LocalTraining, Trainer, trainable_parameters
from fedlens.federated.client_statistics import EXAMPLES, client_statistic
from fedlens.federated.diagnostics import make_diagnostics
from fedlens.federated.rounds import FederatedAlgorithm, OnUpdate, RoundReport, ServerState
from fedlens.federated.sampling import Sample, cohort_size, draw_cohort
from fedlens.federated.server.carried import rules
from fedlens.federated.server.correction import Correction
from fedlens.federated.server.optimizers import make_server_optimizer
from fedlens.federated.tasks import Cohort, Engine
from fedlens.models.architectures.batch_norm import MODES, Mode
from fedlens.params import Params
from fedlens.registry import Range, server_optimizer
from fedlens.registry import correction as corrections
from fedlens.registry import engine as engines
from fedlens.registry import sampling as samplings
from fedlens.training.optimizers import ClientOptimizer, Sgd
from fedlens.training.precision import Precision
from fedlens.training.step import StepSettings

DIAGNOSTICS = ("update_norms", "drift", "cosine", "sign_agreement")
RANGES = {
    "lr": Range("(0, inf)"),
    "local_steps": Range("[1, inf)"),
    "batch_size": Range("[1, inf)"),
    "momentum": Range("[0, 1)"),
    "proximal": Range("[0, inf)"),
    "mu": Range("[0, inf)"),
    "label_smoothing": Range("[0, 1]"),
    "clip_norm": Range("(0, inf)"),
    "dropout": Range("[0, 1)"),
    "statistics_examples": Range("[1, inf)"),
}
SERVER_PARAMETERS = {  # argument here → parameter of the server optimizer's row
    "server_lr": "lr",
    "server_momentum": "momentum",
    "beta1": "momentum",
}
Data = Examples | tuple[Array, Array] | Sequence[tuple[torch.Tensor, int]]
AggregatorChoice = str | Mapping[str, Any] | Callable[..., Any]
SamplingChoice = str | Mapping[str, Any] | Sample


class Options(TypedDict, total=False):
    """The keyword arguments of `fedavg`, which the other algorithms take too."""

    lr: Required[float]
    local_steps: Required[int]
    batch_size: Required[int]
    momentum: float
    optimizer: ClientOptimizer | None
    proximal_to: ProximalTo
    carry_momentum: bool
    masks: Mapping[str, torch.Tensor] | None
    aggregator: AggregatorChoice
    statistics_examples: int | None
    seed: int
    engine: str
    workers: int | None
    threads: int | None
    label_smoothing: float
    clip_norm: float | None
    batch_norm: Mode
    diagnostics: Sequence[str]
    bad_update: Literal["skip", "raise"]


@dataclass(frozen=True, eq=False)
class Federation:
    """A federated algorithm with its clients: `init` a state, `sample` a cohort, `apply` a round.

    It trains copies, so the model it was made from stays as it is. With worker processes, call
    `close` at the end, or use it in a `with` statement.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> data = torch.randn(40, 3), torch.arange(40) % 2
        >>> clients = fl.partition(data[1], clients=4)
        >>> fed = fl.fedavg(torch.nn.Linear(3, 2), data, clients, lr=0.1, local_steps=2,
        ...                 batch_size=5)
        >>> state = fed.init()
        >>> cohort = fed.sample(state, participation=0.5)
        >>> following, report = fed.apply(state, cohort)
        >>> state.round, following.round, len(cohort.drawn)
        (0, 1, 2)
    """

    algorithm: FederatedAlgorithm
    start: Params  # the model's parameters that require gradients, before the first round
    masks: Mapping[str, torch.Tensor]
    sizes: Sequence[int]  # examples of each client
    lr: float
    local_steps: int
    carried: Params  # BatchNorm's statistics before the first round, where they are trained

    def init(self) -> ServerState:
        """The state before the first round, with the model's own parameters."""
        masks = {name: mask for name, mask in self.masks.items() if mask.any()}
        frozen = self.masks.keys() - masks.keys()
        trained = {name: value for name, value in self.start.items() if name not in frozen}
        state = self.algorithm.init(trained, masks=masks, carried=self.carried)
        return replace(state, base=self.start)

    def sample(
        self,
        state: ServerState,
        participation: float = 0.1,
        *,
        lr: float | None = None,
        sampling: SamplingChoice = "uniform",
        dropout: float = 0.0,
        min_local_steps: int | None = None,
    ) -> Cohort:
        """Draws the clients of the next round; the same state gives the same cohort.

        Args:
            state: The state that the round starts from.
            participation: The share of the clients that take part, rounded up.
            lr: The clients' learning rate in this round; by default that of the algorithm.
            sampling: `"uniform"`, `"cyclic"`, `"chain"` for clients that train one after another,
                a row with parameters (`{"name": "chain", "chains": 2}`), or a function
                `(seed, round, clients, size)` that returns client numbers, or chains of them.
            dropout: The probability that a sampled client does not answer.
            min_local_steps: Stragglers: steps are drawn from here to the algorithm's local_steps.
        """
        if lr is not None:
            _check(lr=lr)
        if not 1 <= (min_local_steps or 1) <= self.local_steps:
            raise FedlensError(
                f"min_local_steps={min_local_steps} must be from 1 to local_steps="
                f"{self.local_steps}."
            )
        _check(dropout=dropout)
        return draw_cohort(
            self.algorithm.seed,
            state.round + 1,
            self.sizes,
            size=cohort_size(len(self.sizes), participation),
            lr=self.lr if lr is None else lr,
            local_steps=self.local_steps,
            min_local_steps=min_local_steps,
            dropout=dropout,
            sample=_sample(sampling),
        )

    def apply(
        self, state: ServerState, cohort: Cohort, *, on_update: OnUpdate | None = None
    ) -> tuple[ServerState, RoundReport]:
        """One round: the next state, and a report. The state it starts from stays as it is."""
        return self.algorithm.apply(state, cohort, on_update=on_update)

    def close(self) -> None:
        """Ends worker processes, if there are any."""
        self.algorithm.engine.close()

    def __enter__(self) -> "Federation":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def fedavg(
    model: nn.Module,
    data: Data,
    clients: Partition,
    *,
    lr: float,
    local_steps: int,
    batch_size: int,
    momentum: float = 0.0,
    optimizer: ClientOptimizer | None = None,
    proximal: float = 0.0,
    proximal_to: ProximalTo = "start",
    carry_momentum: bool = False,
    correction: Correction | None = None,
    masks: Mapping[str, torch.Tensor] | None = None,
    aggregator: AggregatorChoice = "mean",
    statistics_examples: int | None = EXAMPLES,
    seed: int = 0,
    engine: str = "serial",
    workers: int | None = None,
    threads: int | None = None,
    label_smoothing: float = 0.0,
    clip_norm: float | None = None,
    batch_norm: Mode = "frozen",
    diagnostics: Sequence[str] = DIAGNOSTICS,
    bad_update: Literal["skip", "raise"] = "skip",
) -> Federation:
    """Federated averaging of a classifier: McMahan et al., 2017, https://arxiv.org/abs/1602.05629.

    The model is a classifier whose `forward` takes a batch of inputs and returns logits. Clients
    train the parameters that require gradients; the loss is the cross-entropy. The model is in
    evaluation mode throughout, as in fine-tuning: dropout layers do nothing, and BatchNorm layers
    use their stored statistics unless `batch_norm` says otherwise.

    Args:
        model: Any `nn.Module`; it is copied, not changed.
        data: All clients' data: `(inputs, labels)` tensors, a dataset, or `Examples`.
        clients: Which examples each client holds.
        lr: The clients' learning rate.
        local_steps: Optimizer steps of a client in one round.
        batch_size: Of the clients; an example comes again only after all others of its client.
        momentum: Of the clients' SGD, from 0 in every round.
        optimizer: A client optimizer instead of SGD, such as `AdamW()`.
        proximal: μ of FedProx.
        proximal_to: Of chains: FedProx's term pulls each client to its own "start", or to the
            global model that began the "round".
        carry_momentum: Of chains: momentum passes from client to client, from 0 in every round.
        correction: A term in the clients' gradients from what the server remembers, as `ghbm`,
            `fedcm`, `feddyn` and `scaffold` set it, or of your own.
        masks: Name → bool tensor: of these parameters only the entries that are True are trained
            and sent. A parameter without a mask is trained whole.
        aggregator: A row's name (`"median"`), a row with parameters
            (`{"name": "trimmed_mean", "trim": 0.2}`), or a function `(updates, weights)` of the
            clients' changes w_k − w that returns the change of the global model.
        statistics_examples: Of each client, for aggregators that need more than updates: "regmean"
            (moments of the layers' inputs) and "fisher_average"; None means all examples.
        seed: Of all random draws.
        engine: `"serial"`, `"parallel"` for worker processes, or a row of your own. The first two
            give the same bits if they use the same number of threads.
        workers: Worker processes of `"parallel"`; by default as many as there are cores.
        threads: CPU threads for each client; by default torch's number, or 1 with workers.
        label_smoothing: Of the cross-entropy.
        clip_norm: Gradients longer than this are shortened to it.
        batch_norm: "frozen" keeps the statistics of BatchNorm layers as they are, for pretrained
            models. "averaged" lets clients update them on their batches and averages them, for
            models trained from scratch; `ServerState.parameters` then has them too. "local" is
            FedBN: every client also keeps its own BatchNorm layers between rounds, and the state
            has their average. A layer whose scale and shift are frozen keeps its statistics.
        diagnostics: What reports measure of the clients' updates, by name.
        bad_update: Leave updates out of the average that are not finite, or 1000 times as large as
            the model ("skip"), or "raise".

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> import fedlens as fl
        >>> _ = torch.manual_seed(0)
        >>> inputs = torch.randn(60, 4)
        >>> labels = (inputs.sum(1) > 0).long()
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> clients = fl.partition(labels, clients=6)
        >>> fed = fl.fedavg(model, (inputs, labels), clients, lr=0.1, local_steps=4, batch_size=5)
        >>> state = fed.init()
        >>> for _ in range(20):
        ...     state, report = fed.apply(state, fed.sample(state, participation=0.5))
        >>> state.round, len(report.accepted)
        (20, 3)
        >>> missing, unknown = model.load_state_dict(state.parameters, strict=False)
        >>> bool((model(inputs).argmax(1) == labels).double().mean() > 0.8)
        True
    """
    _check(lr=lr, local_steps=local_steps, batch_size=batch_size, momentum=momentum)
    _check(proximal=proximal, label_smoothing=label_smoothing)
    if clip_norm is not None:
        _check(clip_norm=clip_norm)
    if statistics_examples is not None:
        _check(statistics_examples=statistics_examples)
    if bad_update not in ("skip", "raise"):
        raise FedlensError(
            f"bad_update='{bad_update}' is unknown: {suggest(bad_update, ('skip', 'raise'))}"
        )
    if proximal_to not in PROXIMAL_TO:
        options = suggest(proximal_to, PROXIMAL_TO)
        raise FedlensError(f"proximal_to='{proximal_to}' is unknown: {options}")
    if batch_norm not in MODES:
        raise FedlensError(f"batch_norm='{batch_norm}' is unknown: {suggest(batch_norm, MODES)}")
    make = _aggregator(aggregator)
    examples = as_examples(data)
    _check_partition(clients, examples)
    start = params.copy(trainable_parameters(model))
    masks = masks or {}
    model, trained_masks = _trainable_copy(model, masks)
    device = next(model.parameters()).device
    local = LocalTraining(
        StepSettings(
            Precision("fp32", device.type), label_smoothing=label_smoothing, clip_norm=clip_norm
        ),
        batch_size,
        optimizer or Sgd(momentum=momentum),
        proximal=proximal,
        proximal_to=proximal_to,
        carry_momentum=carry_momentum,
    ).corrected(correction)
    trainer = Trainer(
        model,
        examples.to(device),
        clients.shard,
        local,
        seed,
        masks=trained_masks,
        statistic=client_statistic(_needs(aggregator), statistics_examples),
        mode=batch_norm,
    )
    algorithm = FederatedAlgorithm(
        _engine(engine, trainer, len(clients), workers, threads),
        local,
        make,
        correction=correction,
        carried=rules(trainer.model, batch_norm),
        own=tuple(trainer.own_names),
        population=len(clients),
        diagnostics=make_diagnostics(diagnostics),
        bad_update=bad_update,
        statistics=trainer.statistics_layout(),
        seed=seed,
    )
    sizes = clients.sizes.tolist()
    return Federation(
        algorithm,
        start,
        masks,
        sizes,
        lr=lr,
        local_steps=local_steps,
        carried=params.copy(trainer.carried),
    )


def fedprox(
    model: nn.Module, data: Data, clients: Partition, *, mu: float, **options: Unpack[Options]
) -> Federation:
    """FedProx: clients add μ(w − w_global) to each gradient.

    Li et al., 2020, https://arxiv.org/abs/1812.06127.

    Args:
        model: As in `fedavg`.
        data: As in `fedavg`.
        clients: As in `fedavg`.
        mu: μ, how strongly clients are held to the global model; 0 is FedAvg.
        **options: The other arguments of `fedavg`.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> data = torch.randn(20, 3), torch.arange(20) % 2
        >>> clients = fl.partition(data[1], clients=2)
        >>> fed = fl.fedprox(torch.nn.Linear(3, 2), data, clients, mu=0.1, lr=0.1, local_steps=2,
        ...                  batch_size=5)
        >>> state, report = fed.apply(fed.init(), fed.sample(fed.init(), participation=1.0))
        >>> report.accepted
        (0, 1)
    """
    _check(mu=mu)
    return fedavg(model, data, clients, proximal=mu, **options)


def scaffold(
    model: nn.Module, data: Data, clients: Partition, **options: Unpack[Options]
) -> Federation:
    """SCAFFOLD: control variates correct for client drift; arguments as in `fedavg`.

    Clients remember their control variates between rounds, in the server state. Needs SGD.
    Karimireddy et al., 2020, https://arxiv.org/abs/1910.06378.

    Args:
        model: As in `fedavg`.
        data: As in `fedavg`.
        clients: As in `fedavg`.
        **options: The other arguments of `fedavg`.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> data = torch.randn(20, 3), torch.arange(20) % 2
        >>> clients = fl.partition(data[1], clients=2)
        >>> fed = fl.scaffold(torch.nn.Linear(3, 2), data, clients, lr=0.1, local_steps=2,
        ...                   batch_size=5)
        >>> state, report = fed.apply(fed.init(), fed.sample(fed.init(), participation=1.0))
        >>> sorted(state.correction["control"])
        ['bias', 'weight']
    """
    return fedavg(model, data, clients, correction=SCAFFOLD(), **options)


def ghbm(
    model: nn.Module,
    data: Data,
    clients: Partition,
    *,
    tau: int,
    beta: float = 0.9,
    **options: Unpack[Options],
) -> Federation:
    """GHBM: clients add the momentum of the global model over τ rounds to each step.

    w ← w − η·g + β·m/J, where m = (w^t − w^(t−τ))/τ. The state holds τ models. Needs SGD.
    Zaccone et al., 2023, https://arxiv.org/abs/2311.18578.

    Args:
        model: As in `fedavg`.
        data: As in `fedavg`.
        clients: As in `fedavg`.
        tau: τ, in rounds: 1/participation of them visit all clients under cyclic sampling.
        beta: β, the share of the momentum that is added; 0 is FedAvg.
        **options: The other arguments of `fedavg`.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> data = torch.randn(20, 3), torch.arange(20) % 2
        >>> clients = fl.partition(data[1], clients=4)
        >>> fed = fl.ghbm(torch.nn.Linear(3, 2), data, clients, tau=2, lr=0.1, local_steps=2,
        ...               batch_size=5)
        >>> state = fed.init()
        >>> for _ in range(3):
        ...     state, report = fed.apply(state, fed.sample(state, 0.5, sampling="cyclic"))
        >>> len(state.correction)
        2
    """
    return fedavg(
        model, data, clients, correction=_correction("ghbm", beta=beta, tau=tau), **options
    )


def fedcm(
    model: nn.Module,
    data: Data,
    clients: Partition,
    *,
    alpha: float = 0.1,
    **options: Unpack[Options],
) -> Federation:
    """FedCM: clients mix each gradient with the direction Δ of the last round, α·g + (1 − α)·Δ.

    Needs SGD. Xu et al., 2021, https://arxiv.org/abs/2106.10874.

    Args:
        model: As in `fedavg`.
        data: As in `fedavg`.
        clients: As in `fedavg`.
        alpha: α, the share of a client's own gradient; 1 is FedAvg.
        **options: The other arguments of `fedavg`.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> data = torch.randn(20, 3), torch.arange(20) % 2
        >>> clients = fl.partition(data[1], clients=2)
        >>> fed = fl.fedcm(torch.nn.Linear(3, 2), data, clients, alpha=0.2, lr=0.1, local_steps=2,
        ...                batch_size=5)
        >>> state, report = fed.apply(fed.init(), fed.sample(fed.init(), participation=1.0))
        >>> sorted(state.correction["direction"])
        ['bias', 'weight']
    """
    return fedavg(model, data, clients, correction=_correction("fedcm", alpha=alpha), **options)


def feddyn(
    model: nn.Module,
    data: Data,
    clients: Partition,
    *,
    alpha: float = 0.01,
    **options: Unpack[Options],
) -> Federation:
    """FedDyn: dynamic regularisation, g − λ_i + α(w − w_global), so that clients' optima agree.

    Clients remember λ_i between rounds, in the server state. With any client optimizer.
    Acar et al., 2021, https://arxiv.org/abs/2111.04263.

    Args:
        model: As in `fedavg`.
        data: As in `fedavg`.
        clients: As in `fedavg`.
        alpha: α, how strongly clients are regularised; positive, since its limit 0 is not FedAvg.
        **options: The other arguments of `fedavg`; the aggregator is the mean.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> data = torch.randn(20, 3), torch.arange(20) % 2
        >>> clients = fl.partition(data[1], clients=2)
        >>> fed = fl.feddyn(torch.nn.Linear(3, 2), data, clients, alpha=0.1, lr=0.1, local_steps=2,
        ...                 batch_size=5)
        >>> state, report = fed.apply(fed.init(), fed.sample(fed.init(), participation=1.0))
        >>> sorted(state.correction["h"])
        ['bias', 'weight']
    """
    if options.get("aggregator", "mean") != "mean":
        raise FedlensError("feddyn computes the global model from the mean: leave aggregator out.")
    return fedavg(model, data, clients, correction=_correction("feddyn", alpha=alpha), **options)


def fednova(
    model: nn.Module, data: Data, clients: Partition, **options: Unpack[Options]
) -> Federation:
    """FedNova: updates are divided by their effective steps; arguments as in `fedavg`.

    Differs from FedAvg where clients do different numbers of steps. Needs SGD.
    Wang et al., 2020, https://arxiv.org/abs/2007.07481.

    Args:
        model: As in `fedavg`.
        data: As in `fedavg`.
        clients: As in `fedavg`.
        **options: The other arguments of `fedavg`.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> data = torch.randn(20, 3), torch.arange(20) % 2
        >>> clients = fl.partition(data[1], clients=2)
        >>> fed = fl.fednova(torch.nn.Linear(3, 2), data, clients, lr=0.1, local_steps=8,
        ...                  batch_size=5)
        >>> cohort = fed.sample(fed.init(), participation=1.0, min_local_steps=2)
        >>> state, report = fed.apply(fed.init(), cohort)
        >>> report.accepted
        (0, 1)
    """
    if "aggregator" in options:
        raise FedlensError("fednova aggregates in its own way: use fedavg with that aggregator.")
    options["aggregator"] = "fednova"
    return fedavg(model, data, clients, **options)


def fedavgm(
    model: nn.Module,
    data: Data,
    clients: Partition,
    *,
    server_lr: float = 1.0,
    server_momentum: float = 0.9,
    **options: Unpack[Options],
) -> Federation:
    """FedAvgM: momentum on the server; other arguments as in `fedavg`.

    Hsu et al., 2019, https://arxiv.org/abs/1909.06335.

    Args:
        model: As in `fedavg`.
        data: As in `fedavg`.
        clients: As in `fedavg`.
        server_lr: The server's learning rate.
        server_momentum: β, the share of earlier changes that is kept.
        **options: The other arguments of `fedavg`.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> data = torch.randn(20, 3), torch.arange(20) % 2
        >>> clients = fl.partition(data[1], clients=2)
        >>> fed = fl.fedavgm(torch.nn.Linear(3, 2), data, clients, lr=0.1, local_steps=2,
        ...                  batch_size=5)
        >>> list(fed.init().moments)
        ['first']
    """
    federation = fedavg(model, data, clients, **options)
    return _with_server(
        federation, "momentum", server_lr=server_lr, server_momentum=server_momentum
    )


def fedadam(
    model: nn.Module,
    data: Data,
    clients: Partition,
    *,
    server_lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    **options: Unpack[Options],
) -> Federation:
    """FedAdam: Adam on the server, without bias correction; other arguments as in `fedavg`.

    Steps are about `server_lr` in every coordinate, so choose it as for Adam, not as for SGD.
    Reddi et al., 2021, https://arxiv.org/abs/2003.00295.

    Args:
        model: As in `fedavg`.
        data: As in `fedavg`.
        clients: As in `fedavg`.
        server_lr: The server's learning rate.
        beta1: Decay of the mean of the changes.
        beta2: Decay of the mean of the squared changes.
        tau: τ, added to the denominator; the smaller, the more adaptive.
        **options: The other arguments of `fedavg`.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> data = torch.randn(20, 3), torch.arange(20) % 2
        >>> clients = fl.partition(data[1], clients=2)
        >>> fed = fl.fedadam(torch.nn.Linear(3, 2), data, clients, server_lr=0.01, lr=0.1,
        ...                  local_steps=2, batch_size=5)
        >>> list(fed.init().moments)
        ['first', 'second']
    """
    federation = fedavg(model, data, clients, **options)
    return _with_server(federation, "adam", server_lr=server_lr, beta1=beta1, beta2=beta2, tau=tau)


def fedyogi(
    model: nn.Module,
    data: Data,
    clients: Partition,
    *,
    server_lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    **options: Unpack[Options],
) -> Federation:
    """FedYogi: Yogi on the server, without bias correction; other arguments as in `fedavg`.

    Reddi et al., 2021, https://arxiv.org/abs/2003.00295.

    Args:
        model: As in `fedavg`.
        data: As in `fedavg`.
        clients: As in `fedavg`.
        server_lr: The server's learning rate.
        beta1: Decay of the mean of the changes.
        beta2: Decay of the mean of the squared changes.
        tau: τ, added to the denominator; the smaller, the more adaptive.
        **options: The other arguments of `fedavg`.

    Examples:
        >>> import torch
        >>> import fedlens as fl
        >>> data = torch.randn(20, 3), torch.arange(20) % 2
        >>> clients = fl.partition(data[1], clients=2)
        >>> fed = fl.fedyogi(torch.nn.Linear(3, 2), data, clients, server_lr=0.01, lr=0.1,
        ...                  local_steps=2, batch_size=5)
        >>> list(fed.init().moments)
        ['first', 'second']
    """
    federation = fedavg(model, data, clients, **options)
    return _with_server(federation, "yogi", server_lr=server_lr, beta1=beta1, beta2=beta2, tau=tau)


def _correction(name: str, **parameters: float) -> Correction:
    row = corrections[name]
    made: Correction = row.make(**row.checked(parameters))
    return made


def _with_server(federation: Federation, name: str, **arguments: float) -> Federation:
    row = server_optimizer[name]
    known = {one.name: one for one in row.parameters}
    parameters = {}
    for argument, value in arguments.items():
        parameter = SERVER_PARAMETERS.get(argument, argument)
        parameters[parameter] = replace(known[parameter], name=argument).checked(value)
    server, lr = make_server_optimizer(row, parameters)
    algorithm = replace(federation.algorithm, server=server, server_lr=lr)
    return replace(federation, algorithm=algorithm)


def _check(**arguments: float) -> None:
    for name, value in arguments.items():
        if value not in RANGES[name]:
            raise FedlensError(f"{name}={value} must be {RANGES[name]}.")


def _aggregator(choice: AggregatorChoice) -> MakeAggregator:
    if not isinstance(choice, Mapping):
        return make_aggregator(choice)
    return make_aggregator(*_named(choice, "aggregator", "{'name': 'trimmed_mean', 'trim': 0.2}"))


def _sample(choice: SamplingChoice) -> Sample:
    if not isinstance(choice, Mapping):
        return samplings.row(choice).make
    name, parameters = _named(choice, "sampling", "{'name': 'chain', 'chains': 2}")
    row = samplings[name]
    return partial(row.make, **row.checked(parameters))


def _named(choice: Mapping[str, Any], what: str, example: str) -> tuple[str, dict[str, Any]]:
    """A row's name and its parameters."""
    if not isinstance(choice.get("name"), str):
        raise FedlensError(f"{what} has no name: write it as {example}.")
    return choice["name"], {key: value for key, value in choice.items() if key != "name"}


def _needs(choice: AggregatorChoice) -> str | None:
    return needed_statistic(choice["name"] if isinstance(choice, Mapping) else choice)


def _engine(
    name: str, trainer: Trainer, clients: int, workers: int | None, threads: int | None
) -> Engine:
    row = engines.get(name)
    if row is None:
        raise FedlensError(f"engine='{name}' is unknown: {suggest(name, engines.names)}")
    if row.traits.get("remote"):
        raise FedlensError(f"engine='{name}' needs an experiment: use 'serial' or 'parallel'.")
    given = {"workers": workers, "threads_per_client": threads}
    known = {key: given[key] for key in given if key in row.defaults}
    made: Engine = row.make(trainer, clients, **row.checked(known))
    return made


def _check_partition(clients: Partition, examples: Examples) -> None:
    if len(clients.order) and int(clients.order.max()) >= len(examples):
        raise FedlensError(
            f"The partition is of more than the {len(examples)} examples in data: partition the "
            "labels of the same data."
        )


def _trainable_copy(
    model: nn.Module, masks: Mapping[str, torch.Tensor]
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A copy in evaluation mode, and its masks; parameters masked entirely are frozen."""
    model = deepcopy(model).eval()
    parameters = trainable_parameters(model)
    if unknown := sorted(masks.keys() - parameters.keys()):
        raise FedlensError(
            f"masks names {', '.join(unknown[:3])}, which the model does not have or does not "
            f"train: {suggest(unknown[0], parameters)}"
        )
    if fault := params.mismatch({name: parameters[name] for name in masks}, masks):
        raise FedlensError(f"masks do not fit the model: {fault}.")
    kept = {name: mask for name, mask in masks.items() if mask.any()}
    for name in masks.keys() - kept.keys():
        parameters[name].requires_grad_(False)
    if not trainable_parameters(model):
        raise FedlensError(
            "Nothing is left to train: let some parameters require gradients, or use denser masks."
        )
    return model, kept
