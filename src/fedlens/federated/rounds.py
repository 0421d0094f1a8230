"""The updates of one round as they come in: checked, observed, aggregated, let go."""

import logging
import math
from functools import cached_property

import torch

from fedlens import params
from fedlens.errors import FedlensError
from fedlens.federated.aggregation import TABLE, AggregatorSettings, Contribution, Mean
from fedlens.federated.client import LocalRules, Update, effective_steps
from fedlens.federated.diagnostics import Observer
from fedlens.params import Params
from fedlens.training.step import Tally

log = logging.getLogger(__name__)


class Gathering:
    def __init__(
        self,
        start: Params,
        rules: LocalRules,
        *,
        aggregator: str = "mean",
        settings: AggregatorSettings = AggregatorSettings(),  # noqa: B008  (it is frozen)
        strict: bool = False,
        equal: bool = False,
        hidden: bool = False,
        untold: bool = False,
    ) -> None:
        """`strict`: a bad update ends the run instead of being left out.

        `equal`: clients weigh alike, whatever they hold. `hidden`: each update is the mean of all,
        so that there is nothing to observe of one. `untold`: clients keep their losses to
        themselves.
        """
        self.start = start
        self.mean = Mean(start, settings)  # what drift is measured from, whatever is aggregated
        self.aggregator = self.mean if aggregator == "mean" else TABLE[aggregator](start, settings)
        self.rules = rules
        self.strict = strict
        self.equal = equal
        self.hidden = hidden
        self.untold = untold
        self.observer = Observer(start)
        self.tally = Tally()
        self.losses: list[float] = []
        self.clients: list[int] = []
        self.rejected: dict[int, str] = {}

    def add(self, update: Update) -> bool:
        """Whether the update was taken."""
        task = update.task
        norm = math.nan
        fault = update.fault or params.mismatch(self.start, update.parameters)
        if not fault:
            norm = self.observer.measure(update.parameters)
            if not math.isfinite(norm):
                fault = "it holds values that are not finite"
        if fault:
            self._reject(task.client, task.round, fault)
            return False
        rules = self.rules
        steps = effective_steps(task.steps, rules.momentum, nesterov=rules.nesterov)
        examples = 1 if self.equal else len(task.shard)
        contribution = Contribution(task.client, update.parameters, examples, steps, norm)
        for rule in {self.mean, self.aggregator}:
            rule.add(contribution)
        self.observer.add(norm, examples)
        self.tally += update.tally
        self.losses.append(update.tally.loss / update.tally.seen)
        self.clients.append(task.client)
        return True

    def change(self) -> dict[str, torch.Tensor] | None:
        """The aggregated change; None where no valid update came."""
        if not self.clients:
            return None
        return self._mean_change if self.aggregator is self.mean else self.aggregator.change()

    def metrics(self) -> dict[str, object]:
        """For the record, before the server moves on from `start`.

        A round that nobody answered has none of its own.
        """
        found: dict[str, object] = {"clients": self.clients}
        if self.rejected:
            found["rejected"] = {str(client): why for client, why in self.rejected.items()}
        if not self.clients:
            return found
        if not self.untold:
            found |= {"train": self.tally.metrics(), "client_losses": self.losses}
        if self.hidden:
            return found
        return found | self.observer.metrics(self._mean_change)

    @cached_property
    def _mean_change(self) -> dict[str, torch.Tensor]:
        """Once all updates are in."""
        return self.mean.change()

    def _reject(self, client: int, round_: int, fault: str) -> None:
        said = f"The update of client {client} in round {round_} was rejected: {fault}"
        if self.strict:
            raise FedlensError(f"{said.rstrip('.')} (federated.fail_on_bad_update is set).")
        log.warning("%s", said)
        self.rejected[client] = fault
