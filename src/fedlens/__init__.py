"""Federated learning under the lens of task arithmetic.

Everything below works on plain arguments: any `torch.nn.Module`, tensors, no config, no run folder.
Names are loaded when they are first used, so `import fedlens` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from fedlens.arithmetic.input_moments import input_moments as input_moments
    from fedlens.arithmetic.merging import merge as merge
    from fedlens.arithmetic.task_vectors import apply_task_vector as apply_task_vector
    from fedlens.arithmetic.task_vectors import task_vector as task_vector
    from fedlens.data.partitions.partition import Partition as Partition
    from fedlens.data.partitions.partition import partition as partition
    from fedlens.data.sources.own_images import images as images
    from fedlens.errors import FedlensError as FedlensError
    from fedlens.federated.library import Federation as Federation
    from fedlens.federated.library import fedadam as fedadam
    from fedlens.federated.library import fedavg as fedavg
    from fedlens.federated.library import fedavgm as fedavgm
    from fedlens.federated.library import fedcm as fedcm
    from fedlens.federated.library import feddyn as feddyn
    from fedlens.federated.library import fednova as fednova
    from fedlens.federated.library import fedprox as fedprox
    from fedlens.federated.library import fedyogi as fedyogi
    from fedlens.federated.library import ghbm as ghbm
    from fedlens.federated.library import scaffold as scaffold
    from fedlens.federated.rounds import FederatedAlgorithm as FederatedAlgorithm
    from fedlens.federated.rounds import RoundReport as RoundReport
    from fedlens.federated.rounds import ServerState as ServerState
    from fedlens.models.heads import fit_ridge as ridge  # noqa: F401
    from fedlens.registry import Range as Range
    from fedlens.registry import aggregator as aggregator
    from fedlens.registry import backbone as backbone
    from fedlens.registry import client_optimizer as client_optimizer
    from fedlens.registry import correction as correction
    from fedlens.registry import dataset as dataset
    from fedlens.registry import diagnostic as diagnostic
    from fedlens.registry import engine as engine
    from fedlens.registry import head as head
    from fedlens.registry import mask_rule as mask_rule
    from fedlens.registry import merge_method as merge_method
    from fedlens.registry import model_average as model_average
    from fedlens.registry import partitioner as partitioner
    from fedlens.registry import question as question
    from fedlens.registry import sampling as sampling
    from fedlens.registry import server_optimizer as server_optimizer
    from fedlens.registry import trainable as trainable
    from fedlens.sparse.model_masks import calibrate as calibrate
    from fedlens.sparse.model_masks import fisher as fisher
    from fedlens.sparse.model_masks import mask as mask
    from fedlens.sparse.optimizers.sparse_adamw import SparseAdamW as SparseAdamW
    from fedlens.sparse.optimizers.sparse_sgd import SparseSGDM as SparseSGDM
    from fedlens.store.exported_model import load_model as load_model
    from fedlens.store.table import load_metrics as load_metrics
    from fedlens.store.table import load_runs as load_runs

# Public name → where it is defined.
_PUBLIC = {
    # data
    "images": "fedlens.data.sources.own_images:images",
    "Partition": "fedlens.data.partitions.partition:Partition",
    "partition": "fedlens.data.partitions.partition:partition",
    # sparse fine-tuning
    "fisher": "fedlens.sparse.model_masks:fisher",
    "mask": "fedlens.sparse.model_masks:mask",
    "calibrate": "fedlens.sparse.model_masks:calibrate",
    "SparseSGDM": "fedlens.sparse.optimizers.sparse_sgd:SparseSGDM",
    "SparseAdamW": "fedlens.sparse.optimizers.sparse_adamw:SparseAdamW",
    # federated learning
    "fedavg": "fedlens.federated.library:fedavg",
    "fedprox": "fedlens.federated.library:fedprox",
    "scaffold": "fedlens.federated.library:scaffold",
    "ghbm": "fedlens.federated.library:ghbm",
    "fedcm": "fedlens.federated.library:fedcm",
    "feddyn": "fedlens.federated.library:feddyn",
    "fednova": "fedlens.federated.library:fednova",
    "fedavgm": "fedlens.federated.library:fedavgm",
    "fedadam": "fedlens.federated.library:fedadam",
    "fedyogi": "fedlens.federated.library:fedyogi",
    "Federation": "fedlens.federated.library:Federation",
    "FederatedAlgorithm": "fedlens.federated.rounds:FederatedAlgorithm",
    "ServerState": "fedlens.federated.rounds:ServerState",
    "RoundReport": "fedlens.federated.rounds:RoundReport",
    # closed-form heads
    "ridge": "fedlens.models.heads:fit_ridge",
    # task arithmetic
    "task_vector": "fedlens.arithmetic.task_vectors:task_vector",
    "apply_task_vector": "fedlens.arithmetic.task_vectors:apply_task_vector",
    "merge": "fedlens.arithmetic.merging:merge",
    "input_moments": "fedlens.arithmetic.input_moments:input_moments",
    # finished runs
    "load_runs": "fedlens.store.table:load_runs",
    "load_metrics": "fedlens.store.table:load_metrics",
    "load_model": "fedlens.store.exported_model:load_model",
    # rows of one's own
    "Range": "fedlens.registry:Range",
    "aggregator": "fedlens.registry:aggregator",
    "server_optimizer": "fedlens.registry:server_optimizer",
    "client_optimizer": "fedlens.registry:client_optimizer",
    "correction": "fedlens.registry:correction",
    "model_average": "fedlens.registry:model_average",
    "sampling": "fedlens.registry:sampling",
    "diagnostic": "fedlens.registry:diagnostic",
    "mask_rule": "fedlens.registry:mask_rule",
    "merge_method": "fedlens.registry:merge_method",
    "partitioner": "fedlens.registry:partitioner",
    "dataset": "fedlens.registry:dataset",
    "backbone": "fedlens.registry:backbone",
    "head": "fedlens.registry:head",
    "trainable": "fedlens.registry:trainable",
    "engine": "fedlens.registry:engine",
    "question": "fedlens.registry:question",
    # errors
    "FedlensError": "fedlens.errors:FedlensError",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("fedlens")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fedlens' has no attribute '{name}'")
    module, _, attribute = _PUBLIC[name].partition(":")
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
