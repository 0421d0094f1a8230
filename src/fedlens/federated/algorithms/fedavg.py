"""FedAvg: the mean of the clients' models, weighted by their numbers of examples.

McMahan et al., 2017, https://arxiv.org/abs/1602.05629.
"""

from fedlens.federated.server.aggregation import WeightedMean
from fedlens.registry import aggregator


@aggregator(
    label="FedAvg",
    paper="McMahan et al., 2017, https://arxiv.org/abs/1602.05629",
    order=1,
    name="mean",
)
class FedAvg(WeightedMean):
    """The mean of the clients' models, weighted by their numbers of examples."""
