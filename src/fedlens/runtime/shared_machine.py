"""A machine that other programs use too: how threads wait for each other, and a warning. No torch.

The OpenMP threads that torch computes with meet after every operation, and one that is early spins.
That is fastest on an idle machine; on a busy one it holds the core that the late thread needs.
"""

import logging
import os
import statistics
import time
from collections.abc import MutableMapping
from functools import cache
from pathlib import Path

from fedlens.runtime import machine

# Any of these is the user's own choice of how threads wait: of OpenMP, GNU, and LLVM or Intel.
CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SPINS = 10_000  # of GNU's 300,000: as fast on an idle machine, less harm if it becomes busy
SAMPLES, SAMPLE_S = 5, 0.004

log = logging.getLogger(__name__)


def choose_waiting(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let waiting OpenMP threads sleep where other programs compute, else spin, but not for long.

    It holds for this process and those it starts. OpenMP reads the environment when it is loaded,
    so call this before torch is imported, and only where fedlens is the program: how the threads of
    a library wait is for its user to choose.
    """
    if any(name in environment for name in CHOICES):
        return
    if _computing() + machine.cores_allowed() > machine.cores():
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    else:
        environment["GOMP_SPINCOUNT"] = str(SPINS)


@cache
def warn_if_busy() -> None:
    """Warn where other programs have more to do than this machine has cores.

    Only the first call of a process looks: later ones would find the process's own load.
    """
    average = machine.load_average()
    load = min(average, _computing())  # of a run that has just ended, only the average is left
    if load > machine.cores():
        log.warning(
            "This machine is busy (load %.1f on %d cores), so training will be slow. To use fewer "
            "cores, set threads=1 (in a suite also --jobs 1).",
            load,
            machine.cores(),
        )


def _computing() -> float:
    """Threads of other programs that compute now; where Linux does not say, the load average."""
    counts = []
    for _ in range(SAMPLES):
        if (running := _running()) is None:
            return machine.load_average()
        counts.append(running)
        time.sleep(SAMPLE_S)
    return statistics.median(counts)


def _running() -> int | None:
    """Threads that run at this moment, without this one; None where Linux does not say."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1
    except OSError:
        return None
