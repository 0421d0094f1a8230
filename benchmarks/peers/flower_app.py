"""The Flower app: a client that trains its partition, and FedAvg over the cohorts of the plan.

A module of its own, not the script: Ray sends functions of an importable module by name, so that
data and model, once read, stay in the actor; a script's functions would be sent whole every time.
"""

import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord
from flwr.app import RecordDict as Records
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import nn
from workload import SHARD, Laps, Workload, train_client

client = ClientApp()


@lru_cache(maxsize=1)
def loaded(folder: str, threads: int) -> tuple[Workload, nn.Module]:
    """Once per actor."""
    torch.set_num_threads(threads)
    work = Workload(Path(folder))
    work.train, work.plan  # noqa: B018  (read now, not in a round)
    return work, work.model()


@client.query()
def introduce(message: Message, context: Context) -> Message:
    """Which partition this node holds; by the way, its actor reads the data."""
    _of(message)
    partition = MetricRecord({"partition": context.node_config["partition-id"]})
    return Message(Records({"metrics": partition}), reply_to=message)


@client.train()
def train(message: Message, context: Context) -> Message:
    work, net = _of(message)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    round_ = message.content["config"]["server-round"]
    train_client(net, work, round_, context.node_config["partition-id"])
    metrics = MetricRecord({"num-examples": SHARD})
    reply = Records({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(reply, reply_to=message)


def _of(message: Message) -> tuple[Workload, nn.Module]:
    config = message.content["config"]
    return loaded(config["folder"], config["threads"])


class PlannedFedAvg(FedAvg):
    """Flower's FedAvg, but for whom it samples; every round is timed."""

    def __init__(self, work: Workload) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.work = work
        self.nodes: dict[int, int] = {}
        self.laps: Laps | None = None

    def meet(self, grid: Grid, config: ConfigRecord, count: int) -> None:
        """Asks each of the `count` nodes which partition it holds, and starts the clock."""
        while len(nodes := list(grid.get_node_ids())) < count:
            time.sleep(0.1)  # they are still registering
        asked = self._construct_messages(Records({"config": config}), nodes, MessageType.QUERY)
        for reply in grid.send_and_receive(asked):
            self.nodes[reply.content["metrics"]["partition"]] = reply.metadata.src_node_id
        self.laps = Laps()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        del grid
        config["server-round"] = server_round
        record = Records({self.arrayrecord_key: arrays, self.configrecord_key: config})
        nodes = [self.nodes[partition] for partition in self.work.cohort(server_round)]
        return self._construct_messages(record, nodes, MessageType.TRAIN)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        result = super().aggregate_train(server_round, replies)
        self.laps.lap()
        return result
