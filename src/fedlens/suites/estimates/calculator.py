"""Times and counts the tasks of runs in another process, so that this one never waits for torch.

The process starts to load torch while this one composes configs. Where torch is loaded here
already, no process is started.
"""

import os
import pickle
import subprocess
import sys
from contextlib import suppress
from typing import IO, Any

from fedlens import plugins
from fedlens.errors import FedlensError

COMMAND = [sys.executable, "-m", "fedlens.suites.estimates.calculator"]


class Calculator:
    """Calls functions of `probe` and `counts` by their names; use it as a context."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Calculator":
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    @property
    def separate(self) -> bool:
        """Whether another process calculates: one that has done nothing else."""
        return self._process is not None

    def start(self) -> None:
        """Begins to load torch; without it, the first `call` does."""
        if self._process is None and "torch" not in sys.modules:
            # Threads that spin while they wait would slow each other down on a busy machine.
            environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
            self._process = subprocess.Popen(
                COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )

    def call(self, module: str, function: str, *arguments: Any, **settings: Any) -> Any:
        self.start()
        if self._process is None:
            return _call(module, function, arguments, settings)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _send(process.stdin, plugins.loaded(), (module, function, arguments, settings))
            result, error = pickle.load(process.stdout)
        except (OSError, EOFError) as reason:
            raise FedlensError(
                "The process that times the steps of a run has ended: the machine may lack memory; "
                "close other programs and run the same command again."
            ) from reason
        if error is not None:
            raise error
        return result


def _call(module: str, function: str, arguments: Any, settings: Any) -> Any:
    if module == "counts":
        from fedlens.suites.estimates import counts

        return getattr(counts, function)(*arguments, **settings)
    from fedlens.suites.estimates import probe

    return getattr(probe, function)(*arguments, **settings)


def _send(stream: IO[bytes], *values: object) -> None:
    for value in values:
        pickle.dump(value, stream)
    stream.flush()


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """The main loop of the other process: one call after another until the stream ends."""
    from fedlens.suites.estimates import counts, probe  # noqa: F401  (they load torch, before any request)

    with suppress(EOFError):
        while True:
            pickle.load(requests)  # plugins, which this loads
            module, function, arguments, settings = pickle.load(requests)
            result = error = None
            try:
                result = _call(module, function, arguments, settings)
            except FedlensError as reason:
                error = reason
            except Exception as reason:  # somebody's model, which may raise anything
                error = FedlensError(
                    f"A step of the model cannot be timed ({type(reason).__name__}: {reason})."
                )
            _send(answers, (result, error))


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what models print must not be among the answers
    serve(sys.stdin.buffer, answers)
