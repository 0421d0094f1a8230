"""Secure aggregation: the server learns Σ n_k (w_k − w) over a cohort, and no client's own update.

SecAgg+ (Bell et al., 2020, https://eprint.iacr.org/2020/704) as Flower has it: updates are rounded
to integers and hidden under masks that cancel in the sum; shares of their seeds, held by the other
clients, remove the masks of those who leave on the way.

It keeps updates from a server that follows the protocol, and from its logs. It does not stand up to
one that lies to clients, or that attacks the masks: Flower draws them from a Mersenne Twister with
32 bits of seed. Losses and numbers of examples travel in the clear, and the sum itself is not
noised. Nobody can check a hidden update, so clients check their own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp.typing import ClientAppCallable
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    Parameters,
    Scalar,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.constant import ErrorCode
from flwr.common.secure_aggregation.secaggplus_constants import (
    RECORD_KEY_CONFIGS,
    RECORD_KEY_STATE,
)
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server import ClientManager, LegacyContext
from flwr.server.client_proxy import ClientProxy
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState
from flwr.serverapp import Grid

from fedlens.errors import FedlensError
from fedlens.federated.flower.messages import ARRAYS, METRICS, VALUES, refused
from fedlens.params import Params
from fedlens.training.step import Tally

LEVELS = 2**22  # that the values of an update are rounded to
MODULUS = 2**32  # of the sums, which must not go round
FEWEST, MOST = 3, MODULUS // LEVELS - 1  # clients


@dataclass(frozen=True)
class SecureSettings:
    reach: float = 0.1  # no value of an update w_k − w may be larger; what is rounded grows with it
    threshold: float = 2 / 3  # of the cohort: fewer can remove no masks, and the round is lost
    deadline: float = 600.0  # seconds, for each of the four stages
    heaviest: int | None = None  # the most that a client weighs; None: the examples of the largest

    def __post_init__(self) -> None:
        if not (self.reach > 0 and self.deadline > 0):
            raise FedlensError("The reach and the deadline of secure aggregation must be positive.")
        if not 0.5 < self.threshold <= 1:  # else two halves could be told different stories
            raise FedlensError(
                "The threshold of secure aggregation must be above 0.5 and at most 1, not "
                f"{self.threshold:g}."
            )


@dataclass(frozen=True)
class SecureAnswer:
    change: dict[str, torch.Tensor] | None  # Σ n_k (w_k − w) / Σ n_k in float64; None if it failed
    tallies: dict[int, Tally]  # of the nodes in it
    missing: dict[int, str]  # node → why it is not in it


class Withheld(Exception):
    """Why a client does not put its update into the sum, in words."""


def secure(train: ClientAppCallable) -> ClientAppCallable:
    """`train` as SecAgg+ wants it: a client that answers in masked sums only.

    The protocol goes on from message to message in the node's context, so that one node is one
    client.
    """

    def fit(message: Message, context: Context) -> Message:
        del message.content[RECORD_KEY_CONFIGS]  # the protocol's part, which it has read
        agreed = context.state.config_records[RECORD_KEY_STATE]
        sent = message.content.array_records[ARRAYS][VALUES].numpy()
        reply = train(message, context)
        found = _valid(reply, sent, cast(float, agreed["clipping_range"]))
        metrics = dict(reply.content.metric_records[METRICS])
        weight = min(cast(int, metrics.pop("num-examples")), cast(float, agreed["max_weight"]))
        result = FitRes(
            status=Status(Code.OK, ""),
            parameters=ndarrays_to_parameters([found]),
            num_examples=int(weight),
            metrics=cast(dict[str, Scalar], metrics),
        )
        return Message(fitres_to_recorddict(result, keep_input=True), reply_to=message)

    def call(message: Message, context: Context) -> Message:
        try:
            if RECORD_KEY_CONFIGS not in message.content:
                raise Withheld("it answers to secure aggregation only")
            return secaggplus_mod(message, context, fit)
        except Withheld as reason:
            return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, str(reason)), reply_to=message)

    return call


def secure_round(
    grid: Grid,
    contents: Mapping[int, RecordDict],
    *,
    start: Params,
    round_: int,
    heaviest: int,
    settings: SecureSettings,
) -> SecureAnswer:
    """Node → what its client is told to do, from the parameters `start`.

    No client weighs more than `heaviest`: the most examples that one of them has, or 1 to weigh
    all alike. Clients may leave at any stage, as long as `threshold` of them stay.
    """
    refuse_cohort(len(contents))
    watched = _Watched(grid)
    strategy = _Strategy(contents, grid)
    context = LegacyContext(Context(0, 0, {}, RecordDict(), {}), strategy=strategy)
    context.state[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: round_})
    context.state[MAIN_PARAMS_RECORD] = ArrayRecord()
    _Workflow(contents, heaviest, settings)(cast(Grid, watched), context)
    missing = {
        node: watched.missing.get(node, "too few clients stayed to remove the masks")
        for node in contents
        if node not in strategy.tallies
    }
    if strategy.total is None:
        return SecureAnswer(None, {}, missing)
    parts = torch.split(strategy.total, [value.numel() for value in start.values()])
    change = {
        name: part.view(value.shape)
        for (name, value), part in zip(start.items(), parts, strict=True)
    }
    return SecureAnswer(change, strategy.tallies, missing)


def refuse_cohort(size: int) -> None:
    if not FEWEST <= size <= MOST:
        raise FedlensError(
            f"Secure aggregation needs from {FEWEST} to {MOST} clients in each round, not {size}: "
            "change federated.participation or set privacy.secure=false."
        )


def largest_error(settings: SecureSettings, weights: Iterable[int], heaviest: int) -> float:
    """By which a value of `change` can miss the true mean, because of rounding.

    Values come in steps of s = 2·reach/2²²; each client's n_k/N·(w_k − w) misses by less than s,
    and its weight n_k/N by at most 2⁻²³, which is another s/2; their sum is over Σ n_k/N.
    """
    weights = list(weights)
    step = 2 * settings.reach / LEVELS
    return 1.5 * step * heaviest * len(weights) / sum(weights)


def _valid(reply: Message, sent: np.ndarray, reach: float) -> np.ndarray:
    """The update in float64, if it may go into a sum that nobody can check."""
    if reply.has_error():
        raise Withheld(reply.error.reason)
    if fault := refused(reply.content):
        raise Withheld(fault)
    if ARRAYS not in reply.content:
        raise Withheld("it was not prepared")
    update = reply.content.array_records[ARRAYS][VALUES].numpy().astype(np.float64) - sent
    largest = np.abs(update).max()
    if not np.isfinite(largest):
        raise Withheld("its update holds values that are not finite")
    if largest > reach:
        raise Withheld(f"its update reaches {largest:.3g}, which is beyond privacy.reach={reach:g}")
    return cast(np.ndarray, update)


class _Workflow(SecAggPlusWorkflow):
    """Flower's protocol with our messages, and right where clients leave before they shared keys.

    Nobody's masks involve those; Flower would ask for shares of their keys all the same, or take
    off masks that were never put on.
    """

    def __init__(
        self, contents: Mapping[int, RecordDict], heaviest: int, settings: SecureSettings
    ) -> None:
        super().__init__(
            num_shares=1.0,
            reconstruction_threshold=settings.threshold,
            max_weight=float(heaviest),
            clipping_range=settings.reach,
            quantization_range=LEVELS,
            modulus_range=MODULUS,
            timeout=settings.deadline,
        )
        self.contents = contents

    def setup_stage(self, grid: Grid, context: LegacyContext, state: WorkflowState) -> bool:
        going_on = super().setup_stage(grid, context, state)
        state.nid_to_fitins = dict(self.contents)
        return going_on

    def share_keys_stage(self, grid: Grid, context: LegacyContext, state: WorkflowState) -> bool:
        going_on = super().share_keys_stage(grid, context, state)
        sharing = set(state.active_node_ids)
        state.sampled_node_ids = sharing
        state.nid_to_neighbours = {nid: state.nid_to_neighbours[nid] & sharing for nid in sharing}
        return going_on


class _Strategy(FedAvg):
    """Tells the workflow whom to ask, and keeps what it found."""

    def __init__(self, nodes: Iterable[int], grid: Grid) -> None:
        super().__init__()
        self.proxies: list[ClientProxy] = [GridClientProxy(node, grid, 0) for node in nodes]
        self.tallies: dict[int, Tally] = {}
        self.total: torch.Tensor | None = None

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        del server_round, parameters, client_manager
        return [(proxy, FitIns(Parameters([], ""), {})) for proxy in self.proxies]

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        del server_round, failures
        self.tallies = {
            proxy.node_id: Tally(**cast(dict[str, int], result.metrics))
            for proxy, result in results
        }
        (found,) = parameters_to_ndarrays(results[0][1].parameters)  # the same in all of them
        self.total = torch.from_numpy(found)
        return None, {}


class _Watched:
    """What the protocol needs of a grid: messages end with their stage, and who left is noted."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.missing: dict[int, str] = {}

    def send_and_receive(self, messages: list[Message], *, timeout: float) -> list[Message]:
        for message in messages:
            message.metadata.ttl = timeout
        asked = {message.metadata.dst_node_id for message in messages}
        replies = list(self.grid.send_and_receive(messages, timeout=timeout))
        for reply in replies:
            if reply.has_error():
                self.missing[reply.metadata.src_node_id] = str(reply.error.reason)
        late = asked - {reply.metadata.src_node_id for reply in replies}
        self.missing |= dict.fromkeys(late, f"no answer came within {timeout:g} s")
        return replies
