"""An optimizer step on masked weights against `torch.optim.SGD(foreach=True)`: time and memory.

The parameters are those of ViT-S/16, with gradients of full size and random masks over every
parameter; momentum 0.9 and weight decay 1e-4. Run: python benchmarks/sparse_sgdm.py
"""

from collections.abc import Callable

import timm
import torch
from torch import nn

from fedlens import rng
from fedlens.runtime.allocator import keep_large_blocks
from fedlens.sparse.masked_optimizer import memory
from fedlens.sparse.sparse_sgd import SparseSGDM
from side_by_side import compare, print_table, print_verdict

MAX_TIME = {0.1: 1.0, 1.0: 1.2}  # density: our step's time over SGD's
MAX_MOMENTUM = 0.15  # of SGD's, at density 0.1
STEPS = 2  # in a repeat
OPTIONS = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}


def parameters_with_gradients() -> nn.Module:
    with rng.scoped(rng.generator(0, "benchmark")):
        model: nn.Module = timm.create_model("vit_small_patch16_224", num_classes=0)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
    return model


def steps(optimizer: torch.optim.Optimizer) -> Callable[[], int]:
    def work() -> int:
        for _ in range(STEPS):
            optimizer.step()
        return STEPS

    return work


def main() -> None:
    keep_large_blocks()  # as every run does
    dense = torch.optim.SGD(parameters_with_gradients().parameters(), **OPTIONS, foreach=True)
    figures, rows = {}, []
    for density in MAX_TIME:
        model, draw = parameters_with_gradients(), rng.generator(0, "masks")
        masks = {
            name: torch.rand(parameter.shape, generator=draw) < density
            for name, parameter in model.named_parameters()
        }
        sparse = SparseSGDM(model.named_parameters(), **OPTIONS, masks=masks)
        comparison = compare({"fedlens": steps(sparse), "SGD": steps(dense)}, uncertainty=0.02)
        sizes, whole = memory(sparse), memory(dense)["state"]
        shares = {what: size / whole for what, size in sizes.items()}
        figures[f"time_{density}"] = 1 / comparison.ratio
        figures |= {f"{what}_{density}": share for what, share in shares.items()}
        rows.append(
            [
                f"{density}",
                *(f"{1000 / comparison.speed(side):.1f}" for side in comparison.speeds),
                f"{1 / comparison.ratio:.3f}",
                *(f"{size / 2**20:.1f}" for size in (*sizes.values(), whole)),
                *(f"{share:.3f}" for share in shares.values()),
                str(len(comparison.ratios)),
            ]
        )
    print(
        f"ViT-S/16, {torch.get_num_threads()} threads; milliseconds per step; "
        "MiB of momentum and index, and as shares of SGD's momentum"
    )
    print_table(
        [
            "density", "fedlens ms", "SGD ms", "time ratio",
            "momentum", "index", "SGD's", "momentum share", "index share", "repeats",
        ],
        rows,
    )  # fmt: skip
    met = figures["state_0.1"] <= MAX_MOMENTUM and all(
        figures[f"time_{density}"] <= most for density, most in MAX_TIME.items()
    )
    target = {f"max_time_{density}": most for density, most in MAX_TIME.items()}
    print_verdict("sparse_sgdm", figures, {**target, "max_momentum_0.1": MAX_MOMENTUM}, met)


if __name__ == "__main__":
    main()
