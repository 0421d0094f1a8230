"""A tiny Flower app: the server follows the plan in its settings and prints the replies.

As a program, it is a node's persistent app worker: `echo.py ADDRESS SECRET_FILE`.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

client = ClientApp()
server = ServerApp()
answered = 0


@client.train()
def double(message: Message, context: Context) -> Message:
    """Replies with twice the values; fails if the first value is negative."""
    global answered
    values = message.content.array_records["arrays"]["values"].numpy()
    if values[0] < 0:
        raise ArithmeticError("the value is negative")
    answered += 1
    info = {"pid": os.getpid(), "answered": answered, "text": context.run_config.get("text", "")}
    arrays = ArrayRecord({"values": Array(2 * values)})
    return Message(RecordDict({"arrays": arrays, "info": ConfigRecord(info)}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    settings = context.run_config
    print(json.dumps({"settings": dict(settings)}), flush=True)
    if settings["plan"] == "fail":
        raise ArithmeticError("the sums do not add up")
    while settings["plan"] == "wait":
        time.sleep(0.1)
    batches = json.loads(str(settings["values"]))
    for reply in exchange(grid, _node(grid), batches) if batches else ():
        print(json.dumps(reply), flush=True)


def exchange(grid: Grid, node: int, batches: list[list[float]]) -> list[dict[str, object]]:
    """Sends all messages at once; the replies are in the same order."""
    outgoing = [
        Message(
            RecordDict({"arrays": ArrayRecord({"values": Array(np.array(values))})}),
            dst_node_id=node,
            message_type=MessageType.TRAIN,
            ttl=60.0,
        )
        for values in batches
    ]
    sent = list(grid.push_messages(outgoing))
    replies: dict[str, dict[str, object]] = {}
    until = time.monotonic() + 60
    while len(replies) < len(sent) and time.monotonic() < until:
        for reply in grid.pull_messages([name for name in sent if name not in replies]):
            replies[reply.metadata.reply_to_message_id] = _content(reply)
        time.sleep(0.05)
    return [replies.get(name, {"error": "no reply came"}) for name in sent]


def _content(reply: Message) -> dict[str, object]:
    if reply.has_error():
        return {"error": reply.error.reason}
    values = reply.content.array_records["arrays"]["values"].numpy().tolist()
    return {"values": values, **reply.content.config_records["info"]}


def _node(grid: Grid) -> int:
    for _ in range(300):
        if nodes := list(grid.get_node_ids()):
            return nodes[0]
        time.sleep(0.1)
    raise TimeoutError("no node connected")


if __name__ == "__main__":
    from fedlens.federated.flower.deployment.app_worker import serve

    address, secret = sys.argv[1:]
    serve(client, runtime_api_address=address, secret_file=Path(secret))
