"""Supervised pretraining of the synthetic benchmark's backbone, on classes the benchmark lacks.

The logit of a class is the sum of its colour's, texture's and shape's, so the features must encode
all three and transfer to new combinations. One pass over images that never repeat. The weights of
the default recipe are shipped with the package, so that they are the same bits on every machine.
"""

import hashlib
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from timm.models import named_apply
from timm.models.vision_transformer import init_weights_vit_jax
from torch import Tensor, nn

from fedlens import files, rng
from fedlens.cache import cached
from fedlens.data.examples import ImageExamples, shuffled
from fedlens.data.sources import synthetic
from fedlens.data.transforms import Pipeline
from fedlens.models.architectures import backbones
from fedlens.rng import Stream
from fedlens.training.precision import Precision
from fedlens.training.schedules import Schedule
from fedlens.training.step import StepSettings, Tally, local_step, set_lr

VERSION = 1  # raise it whenever the same recipe gives other weights
SHIPPED = Path(__file__).parent / "shipped"  # CONTRIBUTING.md says how its file is made anew

Progress = Callable[[int, int], None]  # steps done, steps in all


@dataclass(frozen=True)
class Recipe:
    per_class: int = 90
    batch_size: int = 32  # small, since the number of steps matters most with so few images
    lr: float = 2e-3
    weight_decay: float = 0.05
    warmup: float = 0.1
    position_std: float = 0.5
    seed: int = 0


class SumOfParts(nn.Module):
    """logit(class) = Σ over the class's words (colour, texture, shape) of logit(word)."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        words = [*synthetic.COLOURS, *synthetic.TEXTURES, *synthetic.SHAPES]
        _, classes = synthetic.combinations()
        has = [[float(word in combination) for combination in classes] for word in words]
        self.backbone = backbone
        self.words = nn.Linear(backbones.width(backbone), len(words))
        self.register_buffer("has", torch.tensor(has))

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.words(self.backbone(inputs)) @ self.has
        return logits


def pretrain(
    build: Callable[[], nn.Module],
    pipeline: Pipeline,
    *,
    recipe: Recipe | None = None,
    progress: Progress = lambda done, total: None,
) -> dict[str, Tensor]:
    """The pretrained backbone's state; the same bits whenever the number of threads is the same."""
    recipe = recipe or Recipe()
    stream = Stream(recipe.seed, ("pretraining",))
    with rng.scoped(stream.draw("initialisation")):
        model = SumOfParts(_with_large_initial_weights(build(), recipe.position_std))
    examples = ImageExamples(
        synthetic.pretraining(per_class=recipe.per_class), index=None, pipeline=pipeline
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), weight_decay=recipe.weight_decay, betas=(0.9, 0.98), fused=True
    )
    schedule, settings = Schedule(warmup=recipe.warmup), StepSettings(Precision("fp32", "cpu"))
    batches, tally = shuffled(len(examples), recipe.batch_size, stream.draw("order")), Tally()
    for step, index in enumerate(batches):
        set_lr(optimizer, recipe.lr * schedule.factor(step, len(batches)))
        local_step(model, optimizer, examples, index, settings, tally, stream=stream, step=step)
        progress(step + 1, len(batches))
    return dict(model.backbone.state_dict())


def pico_weights(
    *,
    recipe: Recipe | None = None,
    progress: Progress = lambda *_: None,
    check: Callable[[], None] = lambda: None,
) -> Path:
    """The file of vit_pico's weights: shipped with the package, or, for another recipe, pretrained
    on first use. `check` is called while waiting for another process that pretrains them."""
    recipe, row = recipe or Recipe(), backbones.find("vit_pico")
    name = file_name(recipe, row)
    if (shipped := SHIPPED / name).exists():
        return shipped
    path = files.cache_dir() / "weights" / name
    pipeline = Pipeline(backbones.checked_resolution(row, None), row.mean, row.std)
    build = partial(backbones.create, row)
    make = partial(pretrain, build, pipeline, recipe=recipe, progress=progress)
    cached(path, make, check=check)
    return path


def file_name(recipe: Recipe, row: backbones.Backbone) -> str:
    """With a digest of everything that the weights depend on."""
    architecture = {key: getattr(one, "__name__", one) for key, one in backbones.PICO.items()}
    content = (VERSION, synthetic.recipe(), astuple(recipe), sorted(architecture.items()))
    digest = hashlib.sha256(repr((*content, row.mean, row.std)).encode()).hexdigest()
    return f"vit_pico-{digest[:16]}.safetensors"


def _with_large_initial_weights(backbone: nn.Module, position_std: float) -> nn.Module:
    """timm's initial weights (std 0.02) suit wide models and long training; a narrow model that
    trains for a thousand steps needs larger ones in each layer and position embedding."""
    named_apply(init_weights_vit_jax, backbone)
    nn.init.normal_(cast(Tensor, backbone.pos_embed), std=position_std)
    return backbone
