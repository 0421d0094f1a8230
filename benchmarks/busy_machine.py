"""Training steps whose threads wait for each other as `fedlens` chooses, over OpenMP's default.

Each side trains in a process of its own with default threads; the two take turns, on an idle
machine and beside processes that compute without pause. `fedlens` chooses when it starts, so the
processes are started anew beside each load. Run: python benchmarks/busy_machine.py
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from fedlens.runtime.shared_machine import CHOICES, choose_waiting
from side_by_side import compare, print_table, print_verdict

SETTINGS = (
    ("vit_pico", None, 32, 3),
    ("vit_tiny", 64, 8, 3),
)  # backbone, px, batch, steps in a repeat
BUSY = (0, 1, 2)  # processes that compute beside it
CLASSES = 100
LIMIT_S = 240.0  # after which a process ends by itself, whatever becomes of this one
MIN_IDLE, MIN_BUSY = 0.98, 2.0
REPEATS_IDLE = {"min_repeats": 12, "max_repeats": 40, "uncertainty": 0.005}
REPEATS_BUSY = {"min_repeats": 3, "max_repeats": 6, "uncertainty": 0.2}  # they differ by factors

COMPUTE = f"import time\nend = time.monotonic() + {LIMIT_S}\nwhile time.monotonic() < end: pass"


def train(name: str, resolution: int | None, batch: int) -> Callable[[], None]:
    """A training step of the model on one prepared batch."""
    import torch
    import torch.nn.functional as F

    from fedlens.models import heads
    from fedlens.models.architectures import backbones
    from fedlens.models.classifier import Classifier
    from fedlens.runtime.allocator import keep_large_blocks

    keep_large_blocks()  # as every run does
    row = backbones.find(name)
    backbone = backbones.create(row, resolution=resolution)
    model = Classifier(backbone, heads.linear(backbones.width(backbone), CLASSES, 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    pixels = backbones.checked_resolution(row, resolution)
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(batch, 3, pixels, pixels, generator=draw)
    labels = torch.randint(CLASSES, (batch,), generator=draw)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def serve(setting: int) -> None:
    """The main function of a side: as many steps as each line of its input asks for."""
    step = train(*SETTINGS[setting][:3])
    for line in sys.stdin:
        for _ in range(int(line)):
            step()
        print("done", flush=True)


@contextmanager
def side(setting: int, environment: dict[str, str]) -> Iterator[Callable[[], int]]:
    """A process that trains with this environment; yields a function that has it do a repeat."""
    *_, batch, steps = SETTINGS[setting]
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(setting)],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None

    def work() -> int:
        process.stdin.write(f"{steps}\n")
        if process.stdout.readline() != "done\n":
            raise RuntimeError("the training process has ended")
        return steps * batch

    try:
        yield work
    finally:
        process.kill()
        process.wait()


@contextmanager
def busy(count: int) -> Iterator[None]:
    """`count` processes that compute without pause."""
    processes = [subprocess.Popen([sys.executable, "-c", COMPUTE]) for _ in range(count)]
    try:
        time.sleep(0.5 if count else 0)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def environments() -> dict[str, dict[str, str]]:
    """As `fedlens` sets it, and as OpenMP has it."""
    plain = {name: value for name, value in os.environ.items() if name not in CHOICES}
    ours = dict(plain)
    choose_waiting(ours)
    return {"fedlens": ours, "default": plain}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--set", metavar="NAME=VALUE", help="compare this instead, such as GOMP_SPINCOUNT=1000"
    )
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve)
        return
    figures, rows = {}, []
    for setting, (name, *_) in enumerate(SETTINGS):
        for count in BUSY:
            with busy(count), ExitStack() as stack:
                sides = environments()
                if arguments.set:
                    key, _, value = arguments.set.partition("=")
                    sides["fedlens"] = sides["default"] | {key: value}
                works = {
                    label: stack.enter_context(side(setting, own)) for label, own in sides.items()
                }
                comparison = compare(works, **(REPEATS_BUSY if count else REPEATS_IDLE))
            figures[f"{name}_beside_{count}"] = comparison.ratio
            chosen = dict(sides["fedlens"].items() - sides["default"].items())
            words = " ".join(f"{key}={value}" for key, value in chosen.items())
            rows.append(comparison.row(f"{name}, beside {count}: {words}"))
    print(f"random weights and pixels, {os.cpu_count()} cores; images per second")
    print_table(["setting", "fedlens", "default", "ratio", "repeats"], rows)
    met = all(
        ratio >= (MIN_IDLE if figure.endswith("_0") else MIN_BUSY)
        for figure, ratio in figures.items()
    )
    print_verdict("busy_machine", figures, {"idle": MIN_IDLE, "busy": MIN_BUSY}, met)


if __name__ == "__main__":
    main()
