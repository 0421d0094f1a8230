"""A classifier is a backbone and a linear head: logits = head(keep ⊙ backbone(x)).

Its inputs may be activations of the backbone instead: those at a `Cut` after its frozen blocks.
"""

import torch
from torch import nn

from fedlens.models import lora
from fedlens.models.batch_norm import Mode, statistics
from fedlens.models.linearised import expansion
from fedlens.models.prefix import Cut

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
    ) -> None:
        """`linearised` replaces the backbone by its expansion around its present parameters."""
        super().__init__()
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
        features: torch.Tensor
        if self._origin:
            features = expansion(self.backbone, self.origin, inputs)
        elif self.cut is not None:
            features = self.cut.rest(self.backbone, inputs)
        else:
            features = self.backbone(inputs)
        if keep is not None:
            features = features * keep
        logits: torch.Tensor = self.head(features)
        return logits


def carried(model: nn.Module, batch_norm: Mode) -> dict[str, torch.Tensor]:
    """Tensors that training changes although they have no gradients, by name.

    These are the statistics of trained BatchNorm layers, and the weights under LoRA whose products
    are averaged exactly.
    """
    tensors = {} if batch_norm == "frozen" else statistics(model)
    parameters = dict(model.named_parameters())
    return tensors | {
        one.original: parameters[one.original].detach() for one in lora.names(model) if one.exact
    }
