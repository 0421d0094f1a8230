"""A machine that other programs use too: threads that wait give up their core.

The OpenMP threads that torch computes with meet at a barrier after every operation. By default a
thread that arrives early spins there for milliseconds, on the core that the late one waits for.
No torch.
"""

import logging
import os
from collections.abc import MutableMapping
from functools import cache
from pathlib import Path

# Any of these is the user's own choice of how threads wait: of OpenMP, GNU, and LLVM or Intel.
CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")

log = logging.getLogger(__name__)


def wait_without_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let waiting OpenMP threads sleep, in this process and those it starts.

    OpenMP reads the environment when it is loaded, so call this before torch is imported, and only
    where fedlens is the program: how a library's threads wait is for its user to choose.
    """
    if not any(name in environment for name in CHOICES):
        environment["OMP_WAIT_POLICY"] = "PASSIVE"


@cache
def warn_if_busy() -> None:
    """Warn where other programs have more to do than this machine has cores.

    Only the first call of a process looks: later ones would find the process's own load.
    """
    cores, load = os.cpu_count() or 1, _load()
    if load > cores:
        log.warning(
            "Other programs keep this machine busy (load %.1f on %d cores), so training will be "
            "slow: end them, or set threads=1, and --jobs 1 for a suite.",
            load,
            cores,
        )


def _load() -> float:
    """Of the last minute, but no more than now: a run that has just ended does not count."""
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):  # Windows has none
        return 0.0
    now = _running()
    return load if now is None else min(load, now)


def _running() -> int | None:
    """Threads that compute at this moment, without this one; None where Linux does not say."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1
    except OSError:
        return None
