"""Why a node does not do what it was asked: the only texts of errors that leave a node.

A server chooses what a node is asked, so an error with a path, a value or a hash of the node's host
would tell the server about that host. The node's own log has the details.
"""

from enum import StrEnum

from fedlens.errors import FedlensError


class Refusal(StrEnum):
    """What a node may reply in place of a result."""

    MESSAGE = "the node cannot read the message it was sent: its log says why."
    SETUP = "the node refuses the setup it was sent: its log says why."
    PLUGIN = (
        "the experiment needs a plugin that is not loaded on the node, or is another one "
        "there: start the node with the same --plugin."
    )
    WEIGHTS = (
        "the backbone's weights on the node do not have the hash of the server's: use the "
        "file with that hash."
    )
    CLIENT = "the client does not live on this node."
    SECURE_ONLY = "the experiment sends updates by secure aggregation only."
    TOO_LARGE = (
        "its update has a value above max_update_value: raise privacy.max_update_value, "
        "or lower the learning rate."
    )
    NOT_FINITE = "its update holds values that are not finite"
    UNPREPARED = "its node does not have the setup"
    FAILED = "the node failed: its log says why."


class Refused(FedlensError):
    """A refusal; `detail` stays in the node's own log."""

    def __init__(self, reason: Refusal, detail: str = "") -> None:
        self.reason = reason
        super().__init__(f"{reason} ({detail})" if detail else str(reason))
