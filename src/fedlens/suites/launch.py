"""Jobs of a suite, carried out one after another in this process.

A job is a run or an analysis: a function that can be called again after an interruption. A job that
fails does not stop the others; a stop request ends them all.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fedlens.errors import FedlensError
from fedlens.runtime.stop import Interrupted, StopRequest
from fedlens.store.run_folder import RunFolder
from fedlens.suites.eta import Eta


@dataclass(frozen=True)
class Job:
    label: str
    arguments: list[str]  # of the `fedlens` command that repeats it
    call: Callable[[], object] = field(compare=False)  # must be picklable, for other processes
    folder: RunFolder


@dataclass(frozen=True)
class Outcome:
    job: Job
    failure: str | None = None


def run_in_turn(
    jobs: Sequence[Job], eta: Eta, stop: StopRequest, *, until: float = math.inf
) -> Iterator[Outcome]:
    """One after another, each with as many threads as torch has now.

    No job is started after `until`, in seconds of `time.monotonic`.
    """
    import torch

    from fedlens.runtime.threads import limited_threads

    for job in jobs:
        stop.check()
        if time.monotonic() >= until:
            return
        eta.start(job.label, job.folder)
        with limited_threads(torch.get_num_threads()):
            failure = attempt(job.call)
        eta.end(job.label, failed=failure is not None)
        yield Outcome(job, failure)


def attempt(call: Callable[[], object]) -> str | None:
    """Why the call failed, in one sentence; None if it did not."""
    try:
        call()
    except Interrupted:
        raise
    except Exception as error:
        return describe(error)
    return None


def describe(error: Exception) -> str:
    """The message of a `FedlensError`; of other errors the class and the first line."""
    if isinstance(error, FedlensError):
        return str(error)
    return f"{type(error).__name__}: {error}".rstrip(": ").splitlines()[0]
