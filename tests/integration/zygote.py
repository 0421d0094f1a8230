"""Runs `fedlens` in forked children that are killed on request, without importing torch again.

stdin: one JSON object a line {"argv": [...], "die_at": n | null, "signal": name | null,
"half_write": n | null, "of": "checkpoint" | "client_states", "after": s | null, "at": folder |
null, "out": file | null, "err": file | null};
stdout: {"status": exit status, "calls": n, "seconds": s}.
`die_at` sends the child a signal (SIGKILL, if none is named) at its n-th call of fsync, replace,
unlink or rmtree; `half_write` kills it in the middle of writing the tensors of its n-th checkpoint,
or of its n-th client's state; `after` kills it wherever it is after so many seconds of CPU time,
which pass as they do on an idle machine, by a signal that nobody handles. The child works in the
folder `at` and prints to the files `out` and `err`.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scipy.optimize  # noqa: F401  (of ridge heads)
import torch

import fedlens.experiments.run
import fedlens.reporting.figures.search
import fedlens.reporting.terminal.runs
import fedlens.tuning.tune  # noqa: F401  (imported once, for all children)
from fedlens import cli
from fedlens.config.compose import compose
from fedlens.store import checkpoints, client_states

torch.set_num_threads(1)
for chosen in (
    [],
    ["train=head", "augment=none"],
    ["train=head", "augment=none", "algorithm=scaffold"],
):
    compose("quickstart", ["seed=1", *chosen])  # with these presets, the first time takes longest
cli.runs._draw_partition = lambda folder: None  # only the run itself is killed here


def deadly(
    function: Callable[..., Any], calls: list[int], order: dict[str, Any]
) -> Callable[..., Any]:
    def wrapped(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == order.get("die_at"):
            os.kill(os.getpid(), getattr(signal, order.get("signal", "SIGKILL")))
        return function(*args, **options)

    return wrapped


def half_writing(whole: Callable[..., None], nth: int) -> Callable[..., None]:
    saves = [0]

    def save(tensors: dict[str, torch.Tensor], path: Path) -> None:
        whole(tensors, path)
        saves[0] += 1
        if saves[0] == nth:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    return save


def child(order: dict[str, Any], report: int) -> None:
    calls = [0]
    for module, name in ((os, "fsync"), (os, "replace"), (os, "unlink"), (shutil, "rmtree")):
        setattr(module, name, deadly(getattr(module, name), calls, order))
    if order.get("half_write"):
        writer: Any = client_states if order.get("of") == "client_states" else checkpoints
        writer.save_file = half_writing(writer.save_file, order["half_write"])
    signal.setitimer(signal.ITIMER_PROF, order.get("after", 0))
    sys.argv = ["fedlens", *order["argv"]]
    os.chdir(order.get("at", "."))
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(order.get(name, os.devnull), os.O_WRONLY | os.O_CREAT), stream)
    code = 0
    try:
        cli.main()
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(report, str(calls[0]).encode())
    os._exit(code)


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            child(order, writing)
        os.close(writing)
        _, status, used = os.wait4(pid, 0)
        report = {
            "status": os.waitstatus_to_exitcode(status),
            "calls": int(os.read(reading, 100) or 0),
            "seconds": used.ru_utime + used.ru_stime,
        }
        os.close(reading)
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
