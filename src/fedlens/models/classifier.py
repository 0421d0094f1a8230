"""A classifier is a backbone and a linear head: logits = head(keep ⊙ backbone(x)).

Its inputs may be activations of the backbone instead: those at a `Cut` after its frozen blocks.
"""

import torch
from torch import nn

from fedlens.models.architectures.batch_norm import Mode, statistics
from fedlens.models.prefix import Cut
from fedlens.models.trained_parts import lora
from fedlens.models.trained_parts.linearised import expansion

ORIGIN = "origin_"


class Classifier(nn.Module):
    """A backbone with a head; on cached features the backbone is `nn.Identity`."""

    def __init__(
        self,
        backbone: nn.Module,
        head: nn.Linear,
        *,
        batch_norm: Mode = "frozen",
        linearised: bool = False,
        head_changes: bool = False,
    ) -> None:
        """`linearised` replaces the backbone by its expansion around its present parameters.

        `head_changes`: the head has no gradients, but is solved again during training.
        """
        super().__init__()
        self.head_changes = head_changes
        self.backbone = backbone
        self.head = head
        self.batch_norm = batch_norm
        self.cut: Cut | None = None  # where inputs enter; None: they are the backbone's own
        self._origin: dict[str, str] = {}  # the backbone's parameter → the buffer of its origin
        for name, value in backbone.named_parameters() if linearised else ():
            self._origin[name] = ORIGIN + name.replace(".", "_")
            self.register_buffer(self._origin[name], value.detach().clone(), persistent=False)

    @property
    def origin(self) -> dict[str, torch.Tensor]:
        """What a linearised backbone is expanded around; empty if it is not linearised."""
        return {name: self.get_buffer(buffer) for name, buffer in self._origin.items()}

    def forward(self, inputs: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """`keep` is the dropout mask before the head, already scaled.

        The caller draws it, so that it can be reproduced and split into micro-batches.
        """
        features = self.read(inputs)
        if keep is not None:
            features = features * keep
        logits: torch.Tensor = self.head(features)
        return logits

    def read(self, inputs: torch.Tensor) -> torch.Tensor:
        """What the head reads of inputs as `forward` takes them: images, or activations."""
        if self.cut is not None and not self._origin:
            return self.cut.rest(self.backbone, inputs)
        return self.features(inputs)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """What the head reads of these images, whatever `forward` takes as inputs."""
        if self._origin:
            return expansion(self.backbone, self.origin, images)
        features: torch.Tensor = self.backbone(images)
        return features


def carried(model: nn.Module, batch_norm: Mode) -> dict[str, torch.Tensor]:
    """Tensors that training changes although they have no gradients, by name.

    These are the statistics of trained BatchNorm layers, the weights under LoRA whose products are
    averaged exactly, and a head that is solved again.
    """
    tensors = {} if batch_norm == "frozen" else statistics(model)
    parameters = dict(model.named_parameters())
    names = [one.original for one in lora.names(model) if one.exact] + solved_again(model)
    return tensors | {name: parameters[name].detach() for name in names}


def solved_again(model: nn.Module) -> list[str]:
    """The names of the head's parameters, where it is solved again during training."""
    if not (isinstance(model, Classifier) and model.head_changes):
        return []
    return [f"head.{name}" for name, _ in model.head.named_parameters()]
