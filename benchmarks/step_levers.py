"""Ways to a faster training step, each alone and the kept ones together, over the plain step.

The step is that of peers/workload.py: batch 32, SGD with momentum, one thread, as in a worker
process of engine=parallel. Columns: images/s over the plain step's, measured alternately; seconds
of the first step; the largest difference of any parameter after 4 steps. Settings of a process are
compared by child processes, alternately. The first table has the rate of matrix products of the
ViT's shapes through MKL and oneDNN. With one thread, seconds are those of the processor, which
other programs disturb less; first steps are by the clock.
Run: python benchmarks/step_levers.py [--workloads cnn vit] [--levers NAME ...]
"""

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arithmetic import Clock, best_seconds, flop_of_step, gemm_rate
from fedlens.federated.client import in_training_layout
from fedlens.models.architectures import class_token
from fedlens.models.architectures.onednn import is_faster, product, use_onednn
from fedlens.models.architectures.pool_order import pool_first
from fedlens.runtime.allocator import keep_large_blocks
from fedlens.training.optimizers import fuse
from fedlens.training.precision import probe
from peers import workload
from side_by_side import compare, print_table, print_verdict

CHECKED = 4  # steps
STEPS = {"cnn": 10, "vit": 2}  # in a repeat
KEPT = {
    "cnn": ("fused optimizer", "pooling before ReLU"),
    "vit": ("fused optimizer", "class token alone"),
}
MAX_REPEATS = 9
BY_MACHINE = "oneDNN for linear maps"  # kept where a run would choose it
MIN_RATIO = 1.02  # of the kept levers together
SHAPES = {"qkv": (192, 576), "projection": (192, 192), "mlp in": (192, 768), "mlp out": (768, 192)}
ROWS = 32 * 17  # tokens of a batch

ENVIRONMENTS = {
    "huge pages for tensors": {"THP_MEM_ALLOC_ENABLE": "1"},
    "huge pages for malloc": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    "MKL limited to AVX2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "threads bound to cores": {"OMP_PROC_BIND": "true"},
}


@dataclass
class Training:
    """A model, its optimizer and one prepared batch."""

    net: nn.Module
    inputs: Tensor
    labels: Tensor
    optimizer: torch.optim.Optimizer
    forward: Callable[[Tensor], Tensor]

    def step(self) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.forward(self.inputs).float(), self.labels).backward()
        self.optimizer.step()


def plain(name: str) -> Training:
    """As `federated.client.Trainer` has it without shortcuts."""
    torch.manual_seed(0)
    net = in_training_layout(workload.model(name))
    setting = workload.SETTINGS[name]
    inputs = torch.randn(workload.BATCH, 3, setting.resolution, setting.resolution)
    labels = torch.randint(workload.CLASSES, (workload.BATCH,))
    optimizer = torch.optim.SGD(net.parameters(), setting.lr, workload.MOMENTUM)
    return Training(net, inputs, labels, optimizer, net)


# --- the levers: each changes a training in place


def fused_optimizer(one: Training) -> None:
    assert fuse(one.optimizer)


def foreach_optimizer(one: Training) -> None:
    one.optimizer.param_groups[0]["foreach"] = True


def class_token_alone(one: Training) -> None:
    assert class_token.specialise(one.net)


def pooling_before_relu(one: Training) -> None:
    assert pool_first(one.net)


def plain_attention(one: Training) -> None:
    """Two products and a softmax instead of scaled_dot_product_attention."""
    for module in one.net.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False


def patches_by_product(one: Training) -> None:
    """The patch embedding as one matrix product instead of a convolution."""
    embedding = one.net.patch_embed

    def forward(x: Tensor) -> Tensor:
        size = embedding.patch_size[0]
        patches = F.unfold(x, size, stride=size).transpose(1, 2)
        return F.linear(patches, embedding.proj.weight.flatten(1), embedding.proj.bias)

    embedding.forward = forward


def tanh_gelu(one: Training) -> None:
    """Another function: for comparison only."""
    for module in one.net.modules():
        if isinstance(module, nn.GELU):
            module.approximate = "tanh"


def onednn_linear(one: Training) -> None:
    """Linear layers by oneDNN's product instead of MKL's."""
    assert use_onednn(one.net)


def compiled(one: Training) -> None:
    """By inductor, forward and backward."""
    one.forward = torch.compile(one.net)


def bfloat16(one: Training) -> None:
    """Autocast; the child process of `probe` has shown that it does not kill this one."""
    net = one.net

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return net(x)

    one.forward = forward


def contiguous(one: Training) -> None:
    """Without `in_training_layout`: what is gained by channels_last already."""
    for parameter in one.net.parameters():
        parameter.data = parameter.data.contiguous()


LEVERS: dict[str, dict[str, Callable[[Training], None]]] = {
    "cnn": {
        "fused optimizer": fused_optimizer,
        "foreach optimizer": foreach_optimizer,
        "pooling before ReLU": pooling_before_relu,
        "without channels_last": contiguous,
        BY_MACHINE: onednn_linear,
        "bfloat16 autocast": bfloat16,
        "torch.compile": compiled,
    },
    "vit": {
        "fused optimizer": fused_optimizer,
        "foreach optimizer": foreach_optimizer,
        "class token alone": class_token_alone,
        "attention by products": plain_attention,
        "patches by a product": patches_by_product,
        "tanh-GELU": tanh_gelu,
        BY_MACHINE: onednn_linear,
        "bfloat16 autocast": bfloat16,
        "torch.compile": compiled,
    },
}


def batched_cohort(name: str, clients: int = 10) -> Callable[[], int]:
    """A step of all clients at once, with stacked parameters, by torch.func."""
    one = plain(name)
    stacked = {
        key: value.detach().expand(clients, *value.shape).clone()
        for key, value in one.net.named_parameters()
    }
    momenta = {key: torch.zeros_like(value) for key, value in stacked.items()}
    inputs = one.inputs.expand(clients, *one.inputs.shape)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(one.net, parameters, (x,)), one.labels)

    gradient = torch.func.vmap(torch.func.grad(loss))

    def work() -> int:
        for key, value in gradient(stacked, inputs).items():
            momenta[key].mul_(workload.MOMENTUM).add_(value)
            stacked[key].sub_(momenta[key], alpha=workload.SETTINGS[name].lr)
        return clients * workload.BATCH

    return work


# --- measuring


def steps_of(one: Training, count: int) -> Callable[[], int]:
    def work() -> int:
        for _ in range(count):
            one.step()
        return count * workload.BATCH

    return work


def measured(name: str, lever: str, parts: Sequence[str]) -> tuple[float, list[str]]:
    """The ratio of some levers together, and its row of the table."""
    base, faster = plain(name), plain(name)
    for part in parts:
        LEVERS[name][part](faster)
    first = time.perf_counter()
    faster.step()
    first = time.perf_counter() - first
    base.step()
    for _ in range(CHECKED - 1):
        base.step(), faster.step()
    pairs = zip(base.net.parameters(), faster.net.parameters(), strict=True)
    apart = max((a - b).abs().max().item() for a, b in pairs)
    count = STEPS[name]
    ratio = _ratio(steps_of(faster, count), steps_of(base, count))
    print(f"{name}, {lever}: {ratio:.3f}", file=sys.stderr, flush=True)
    return ratio, [name, lever, f"{ratio:.3f}", f"{first:.2f}", f"{apart:.1e}"]


def _ratio(ours: Callable[[], int], base: Callable[[], int]) -> float:
    return compare({"lever": ours, "plain": base}, max_repeats=MAX_REPEATS, clock=clock()).ratio


def clock() -> Clock:
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def in_child(name: str, settings: dict[str, str], threads: int) -> float:
    """Images per second of the plain step in a process with these environment variables."""
    command = [sys.executable, __file__, "--child", name, "--threads", str(threads)]
    done = subprocess.run(
        command, env={**os.environ, **settings}, check=True, stdout=subprocess.PIPE, text=True
    )
    return float(json.loads(done.stdout.splitlines()[-1]))


def environment_rows(name: str, wanted: list[str], threads: int) -> Iterator[list[str]]:
    for lever in ENVIRONMENTS:
        if lever in wanted:
            ratios = [
                in_child(name, ENVIRONMENTS[lever], threads) / in_child(name, {}, threads)
                for _ in range(3)
            ]
            yield [name, lever, f"{statistics.median(ratios):.3f}", "", "0"]


def print_products() -> None:
    """GFLOP/s of the products of a linear layer, forward and for both gradients."""
    rows = []
    for label, (width_in, width_out) in SHAPES.items():
        x, slope = torch.randn(ROWS, width_in), torch.randn(ROWS, width_out)
        weight = torch.randn(width_out, width_in)
        products = [(x, weight), (slope, weight.t()), (slope.t(), x.t())]
        flop = 2 * ROWS * width_in * width_out
        rates = []
        for multiply in (F.linear, product):
            for pair in products:
                work = lambda multiply=multiply, pair=pair: [multiply(*pair) for _ in range(10)]  # noqa: E731
                rates.append(f"{10 * flop / best_seconds(work, clock=clock()) / 1e9:.0f}")
        rows.append([label, *rates])
    sides = [f"{by} {what}" for by in ("MKL", "oneDNN") for what in ("y", "dx", "dw")]
    print_table(["GFLOP/s", *sides], rows)
    print(f"a large product: {gemm_rate(clock()) / 1e9:.0f} GFLOP/s\n")


def main() -> None:
    options = _options()
    keep_large_blocks()  # as every run does
    torch.set_num_threads(options.threads)
    if options.child:
        one = plain(options.child)
        work = steps_of(one, STEPS[options.child])
        images = work()
        print(json.dumps(images / best_seconds(work, clock=clock())))
        return
    print(f"one batch of 32; {options.threads} thread(s)\n")
    print_products()
    if reason := probe("cpu", torch.bfloat16):
        print(f"bfloat16 is left out: {reason}")
    rows, figures = [], {}
    for name in options.workloads:
        levers = [lever for lever in LEVERS[name] if not (reason and lever == "bfloat16 autocast")]
        for lever in [*levers, "all that is kept"]:
            if lever in options.levers:
                kept = (*KEPT[name], *([BY_MACHINE] if is_faster() else []))
                parts = kept if lever == "all that is kept" else (lever,)
                figures[f"{name}, {lever}"], row = measured(name, lever, parts)
                rows.append(row)
        if name == "cnn" and "cohort as one model" in options.levers:
            ratio = _ratio(batched_cohort(name), steps_of(plain(name), 10))
            figures[f"{name}, cohort as one model"] = ratio
            rows.append([name, "cohort as one model", f"{ratio:.3f}", "", ""])
        rows += environment_rows(name, options.levers, options.threads)
    print_table(["workload", "lever", "ratio", "first step, s", "difference"], rows)
    for name in options.workloads:
        one = plain(name)
        flop = flop_of_step(copy.deepcopy(one.net), one.inputs)
        seconds = best_seconds(one.step, clock=clock())
        limit = flop / gemm_rate(clock())
        print(
            f"{name}: {flop / 1e9:.1f} GFLOP a step take at least {1e3 * limit:.0f} ms; the plain "
            f"step takes {1e3 * seconds:.0f} ms, so exact arithmetic allows {seconds / limit:.2f}"
        )
    together = [ratio for name, ratio in figures.items() if name.endswith("all that is kept")]
    print_verdict(
        "step_levers", figures, {"kept": MIN_RATIO}, min(together, default=0.0) >= MIN_RATIO
    )


def _options() -> argparse.Namespace:
    names = [*LEVERS["vit"], *LEVERS["cnn"], "all that is kept", "cohort as one model"]
    names = list(dict.fromkeys([*names, *ENVIRONMENTS]))
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", nargs="+", choices=list(LEVERS), default=list(LEVERS))
    parser.add_argument("--levers", nargs="+", choices=names, default=names)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--child", choices=list(LEVERS), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
