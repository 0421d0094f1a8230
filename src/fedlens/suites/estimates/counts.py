"""The arithmetic of a task, counted without computing: FLOPs per image, bytes alive at its peak.

A step of the model runs on torch's meta device, which has shapes but no values. Products are
counted as 2 FLOPs per multiplication; attention counts as a fused kernel, 4·T²·D per head.
"""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fedlens.config.compose import row_of
from fedlens.config.schema import Config, batch_norm
from fedlens.errors import FedlensError
from fedlens.experiments.build import prepare
from fedlens.models import heads
from fedlens.models.architectures import backbones
from fedlens.models.classifier import Classifier
from fedlens.models.prefix import cut
from fedlens.sparse.parameter_groups import maskable
from fedlens.suites.estimates.cost import (
    EVALUATIONS,
    Count,
    batch_of,
    count_key,
    dataset_sizes,
    skips_blocks,
)

AFTER_BLOCKS = ("train", "evaluate_cached")  # tasks that begin after frozen blocks, if any do
BACKWARD = 2.5  # FLOPs of a fused attention's backward pass, in forward passes


def count(config: Config, task: str) -> Count:
    """The count of one task of a run: train, evaluate, evaluate_cached or calibrate."""
    return _count(_Hashed(config, count_key(config, task)), task)


@dataclass(frozen=True)
class _Hashed:
    """A config, known by what its counts depend on."""

    config: Config
    key: str

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and self.key == other.key


@lru_cache(maxsize=256)
def _count(hashed: _Hashed, task: str) -> Count:
    config = hashed.config
    model, resolution = _model(config)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    masked = _masked(config, trained)
    images = batch_of(config, task)
    inputs = torch.empty(images, 3, resolution, resolution, device="meta")
    if task in AFTER_BLOCKS and skips_blocks(config):
        inputs = begin_after_blocks(model, config.backbone.freeze_blocks, inputs)
    flops, peak = _measured(model, inputs, task)
    return Count(
        flops=flops / images,
        peak=peak,
        parameters=sum(value.numel() for value in model.parameters()),
        trained=sum(value.numel() for value in trained.values()),
        masked=sum(trained[name].numel() for name in masked),
        features=model.head.in_features,
    )


def _masked(config: Config, trained: dict[str, nn.Parameter]) -> list[str]:
    """The names of the tensors that masks would cover; none where only a head is trained."""
    sparse = config.sparse
    kinds = {"biases": sparse.biases, "norms": sparse.norms, "embeddings": sparse.embeddings}
    try:
        return list(maskable(trained, prefix="backbone.", **kinds))
    except FedlensError:
        return []


def begin_after_blocks(model: Classifier, blocks: int, images: torch.Tensor) -> torch.Tensor:
    """Lets the model take activations after so many blocks; those of the images.

    The images themselves if it cannot be cut there: then it takes these.
    """
    with torch.no_grad():
        model.cut = cut(model.backbone, blocks, images[:2])
        return images if model.cut is None else model.cut.first(model.backbone, images)


def _measured(model: Classifier, inputs: torch.Tensor, task: str) -> tuple[float, int]:
    attention, flops, live = _Attention(), FlopCounterMode(display=False), _Live(model)
    with attention, flops, live:
        inputs = torch.empty_like(inputs)  # which is alive too
        if task in EVALUATIONS:
            with torch.inference_mode():
                model(inputs)
        else:
            labels = torch.empty(len(inputs), dtype=torch.long, device="meta")
            loss = F.cross_entropy(model(inputs), labels)
            if loss.requires_grad:
                torch.autograd.backward(loss)
        gradients = sum(value.grad.nbytes for value in model.parameters() if value.grad is not None)
        model.zero_grad(set_to_none=True)
    total = flops.get_total_flops() + attention.flops
    return total, live.peak - (gradients if task == "calibrate" else 0)


def _model(config: Config) -> tuple[Classifier, int]:
    """The run's model on the meta device, and its resolution."""
    row = backbones.find(config.backbone)
    resolution = backbones.checked_resolution(row, config.backbone.resolution)
    try:
        with torch.device("meta"):
            backbone = row.build(resolution)
    except Exception:  # somebody's function, which computes with the values: the shapes are equal
        backbone = row.build(resolution)
    prepare(config, backbone)
    backbone.eval()
    head = heads.linear(backbones.width(backbone), dataset_sizes(config.data)["classes"], 0)
    linearised = row_of(config, "train.trainable").traits.get("linearised", False)
    model = Classifier(
        backbone,
        head.requires_grad_(not config.head.freeze),
        batch_norm=batch_norm(config),
        linearised=linearised,
    )
    return model.to("meta"), resolution


class _Attention(TorchFunctionMode):
    """Counts attention as the fused kernel that runs, which keeps no T × T matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = args[:3]
        tokens = query.shape[-2] * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        forward = 2.0 * query[..., 0, 0].numel() * tokens
        self.flops += forward * (1 + BACKWARD * query.requires_grad)
        return _FusedAttention.apply(query, key, value)


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        del gradients
        return tuple(torch.empty_like(saved) for saved in ctx.saved_tensors[:3])


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of all storages that are alive, and their peak; the model's own do not count."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        own: Mapping[str, torch.Tensor] = {
            **dict(model.named_parameters()), **dict(model.named_buffers()),
        }  # fmt: skip
        self.known = {value.untyped_storage()._cdata: 0 for value in own.values()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._add(value.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self.known:
            return
        self.known[address] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._remove, address)

    def _remove(self, address: int) -> None:
        self.live -= self.known.pop(address, 0)
