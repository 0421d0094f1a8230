"""Secure aggregation: the server learns Σ n_k (w_k − w) over a cohort, but no client's own update.

SecAgg+ (Bell et al., 2020, https://eprint.iacr.org/2020/704) as implemented by Flower.
"""

import logging
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
from fedlens.federated.flower.messages import (
    ARRAYS,
    METRICS,
    VALUES,
    InvalidMessage,
    checked_tally,
    decode_fault,
)
from fedlens.federated.flower.plain import one_line
from fedlens.federated.flower.refusals import Refusal
from fedlens.params import Params
from fedlens.runtime.stop import Interrupted
from fedlens.training.step import Tally

LEVELS = 2**22  # each value of an update is rounded to one of so many
MODULUS = 2**32  # of the integer sums, which must not overflow
MIN_CLIENTS, MAX_CLIENTS = 3, MODULUS // LEVELS - 1

# Why a client whose own part was right is not in the sum: another one lost the round.
BROKEN = "a node did not follow the protocol of secure aggregation"
TOO_FEW = "too few clients stayed to remove the masks"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SecureSettings:
    """Parameters of the protocol; a larger `max_update_value` means larger rounding errors."""

    max_update_value: float = 0.1  # the largest absolute value that an update w_k − w may have
    threshold: float = 2 / 3  # of the cohort must stay to the end, or the round fails
    deadline: float = 600.0  # seconds, for each of the four stages
    max_weight: int | None = None  # of a client; None: the number of examples of the largest

    def __post_init__(self) -> None:
        for name in ("max_update_value", "deadline"):
            if not getattr(self, name) > 0:
                raise FedlensError(f"{name} of secure aggregation must be positive.")
        # With half or less, the server could get one secret of a client's masks from each half of
        # the cohort, and so unmask a single update.
        if not 0.5 < self.threshold <= 1:
            raise FedlensError(
                "The threshold of secure aggregation must be above 0.5 and at most 1, not "
                f"{self.threshold:g}."
            )


@dataclass(frozen=True)
class SecureResult:
    """What the server learns in a round; keys are node ids."""

    change: dict[str, torch.Tensor] | None  # Σ n_k (w_k − w) / Σ n_k in float64; None if it failed
    tallies: dict[int, Tally | None]  # of the nodes in the sum; None: it makes no sense
    missing: dict[int, str]  # why the other nodes are not in it

    @property
    def lost(self) -> bool:
        """Whether there is no sum although some nodes did their part."""
        return self.change is None and not {BROKEN, TOO_FEW}.isdisjoint(self.missing.values())


class UpdateWithheld(Exception):
    """Says why a client does not add its update to the sum."""


def secure_training(train: ClientAppCallable) -> ClientAppCallable:
    """`train` under SecAgg+: the client sends its update masked, and never otherwise.

    The node's context keeps the state of the protocol between messages, so a node must be one
    client.
    """

    def fit(message: Message, context: Context) -> Message:
        del message.content[RECORD_KEY_CONFIGS]  # the protocol has read its part
        state = context.state.config_records[RECORD_KEY_STATE]
        start = message.content.array_records[ARRAYS][VALUES].numpy()
        reply = train(message, context)
        update = _checked_update(reply, start, cast(float, state["clipping_range"]))
        metrics = dict(reply.content.metric_records[METRICS])
        weight = min(cast(int, metrics.pop("num-examples")), cast(float, state["max_weight"]))
        result = FitRes(
            status=Status(Code.OK, ""),
            parameters=ndarrays_to_parameters([update]),
            num_examples=int(weight),
            metrics=cast(dict[str, Scalar], metrics),
        )
        return Message(fitres_to_recorddict(result, keep_input=True), reply_to=message)

    def call(message: Message, context: Context) -> Message:
        try:
            if RECORD_KEY_CONFIGS not in message.content:
                raise UpdateWithheld("it sends updates by secure aggregation only")
            return secaggplus_mod(message, context, fit)
        except UpdateWithheld as reason:
            return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, str(reason)), reply_to=message)

    return call


def secure_round(
    grid: Grid,
    contents: Mapping[int, RecordDict],
    *,
    start: Params,
    round_: int,
    max_weight: int,
    settings: SecureSettings,
) -> SecureResult:
    """Sends `contents` (node → training message) and sums the updates from the parameters `start`.

    Updates are rounded to integers and hidden by masks that cancel in the sum. The other clients
    hold shares of the masks' seeds, so clients may leave at any stage as long as `threshold` of
    them stay. A client's weight is its number of examples, at most `max_weight`; 1 weights all
    equally.

    This hides updates from a server that follows the protocol, and from its logs. It does not
    protect against a malicious server, or against an attack on the masks: Flower draws them from a
    Mersenne Twister with 32 bits of seed. Losses and numbers of examples are sent in the clear, and
    the sum has no noise. The server cannot check a hidden update, so clients check their own.
    """
    check_cohort_size(len(contents))
    recording = _RecordingGrid(grid)
    strategy = _Strategy(contents, grid)
    context = LegacyContext(Context(0, 0, {}, RecordDict(), {}), strategy=strategy)
    context.state[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: round_})
    context.state[MAIN_PARAMS_RECORD] = ArrayRecord()
    try:
        _Workflow(contents, max_weight, settings)(cast(Grid, recording), context)
    except (FedlensError, Interrupted):
        raise
    except Exception as error:  # the protocol does not check what the nodes sent
        log.warning("secure aggregation failed in round %d: %s", round_, one_line(repr(error)))
        return SecureResult(None, {}, dict.fromkeys(contents, BROKEN) | recording.missing)
    missing = {
        node: recording.missing.get(node, TOO_FEW)
        for node in contents
        if node not in strategy.tallies
    }
    sizes = [value.numel() for value in start.values()]
    if strategy.total is not None and strategy.total.shape != (sum(sizes),):
        return SecureResult(None, {}, dict.fromkeys(contents, BROKEN))
    if strategy.total is None:
        return SecureResult(None, {}, missing)
    parts = torch.split(strategy.total, sizes)
    change = {
        name: part.view(value.shape)
        for (name, value), part in zip(start.items(), parts, strict=True)
    }
    return SecureResult(change, strategy.tallies, missing)


def check_cohort_size(size: int) -> None:
    if not MIN_CLIENTS <= size <= MAX_CLIENTS:
        raise FedlensError(
            f"Secure aggregation needs from {MIN_CLIENTS} to {MAX_CLIENTS} clients in each round, "
            f"not {size}: change the participation or turn secure aggregation off."
        )


def max_rounding_error(settings: SecureSettings, weights: Iterable[int], max_weight: int) -> float:
    """The largest error of a value of `change` that rounding can cause.

    Values are rounded in steps of s = 2·max_update_value/2²². The error of n_k/N·(w_k − w) is less
    than s, and that of the weight n_k/N at most 2⁻²³, which adds s/2; N is `max_weight`, and the
    sum is divided by Σ n_k/N.
    """
    weights = list(weights)
    step = 2 * settings.max_update_value / LEVELS
    return 1.5 * step * max_weight * len(weights) / sum(weights)


def _checked_update(reply: Message, start: np.ndarray, max_value: float) -> np.ndarray:
    """The update in float64; raises if it must not be added to the sum."""
    if reply.has_error():
        raise UpdateWithheld(reply.error.reason)
    if fault := decode_fault(reply.content):
        raise UpdateWithheld(fault)
    if ARRAYS not in reply.content:
        raise UpdateWithheld(Refusal.UNPREPARED)
    update = reply.content.array_records[ARRAYS][VALUES].numpy().astype(np.float64) - start
    largest = np.abs(update).max()
    if not np.isfinite(largest):
        raise UpdateWithheld(Refusal.NOT_FINITE)
    if largest > max_value:
        raise UpdateWithheld(Refusal.TOO_LARGE)
    return cast(np.ndarray, update)


class _Workflow(SecAggPlusWorkflow):
    """Flower's protocol with these messages, corrected for clients that leave before sharing keys.

    No masks involve such clients, but Flower would ask for shares of their keys, or remove masks
    that were never added.
    """

    def __init__(
        self, contents: Mapping[int, RecordDict], max_weight: int, settings: SecureSettings
    ) -> None:
        super().__init__(
            num_shares=1.0,
            reconstruction_threshold=settings.threshold,
            max_weight=float(max_weight),
            clipping_range=settings.max_update_value,
            quantization_range=LEVELS,
            modulus_range=MODULUS,
            timeout=settings.deadline,
        )
        self.contents = contents

    def setup_stage(self, grid: Grid, context: LegacyContext, state: WorkflowState) -> bool:
        proceed = super().setup_stage(grid, context, state)
        state.nid_to_fitins = dict(self.contents)
        return proceed

    def share_keys_stage(self, grid: Grid, context: LegacyContext, state: WorkflowState) -> bool:
        proceed = super().share_keys_stage(grid, context, state)
        sharing = set(state.active_node_ids)
        state.sampled_node_ids = sharing
        state.nid_to_neighbours = {nid: state.nid_to_neighbours[nid] & sharing for nid in sharing}
        return proceed


class _Strategy(FedAvg):
    """Gives the workflow its clients, and stores its result."""

    def __init__(self, nodes: Iterable[int], grid: Grid) -> None:
        super().__init__()
        self.proxies: list[ClientProxy] = [GridClientProxy(node, grid, 0) for node in nodes]
        self.tallies: dict[int, Tally | None] = {}
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
        self.tallies = {proxy.node_id: _tally(result.metrics) for proxy, result in results}
        (total,) = parameters_to_ndarrays(results[0][1].parameters)  # the same in all of them
        self.total = torch.from_numpy(total)
        return None, {}


def _tally(metrics: Mapping[str, Scalar]) -> Tally | None:
    try:
        return checked_tally(metrics)
    except InvalidMessage:
        return None


class _RecordingGrid:
    """The part of a grid that the protocol uses; messages expire with their stage.

    It records the nodes that did not answer.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.missing: dict[int, str] = {}

    def send_and_receive(self, messages: list[Message], *, timeout: float) -> list[Message]:
        for message in messages:
            message.metadata.ttl = timeout
        nodes = {message.metadata.dst_node_id for message in messages}
        replies = list(self.grid.send_and_receive(messages, timeout=timeout))
        for reply in replies:
            if reply.has_error():
                self.missing[reply.metadata.src_node_id] = one_line(reply.error.reason)
        late = nodes - {reply.metadata.src_node_id for reply in replies}
        self.missing |= dict.fromkeys(late, f"no answer came within {timeout:g} s")
        return replies
