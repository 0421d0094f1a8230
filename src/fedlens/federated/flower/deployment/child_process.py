"""A child process that never outlives its parent: one command, its own process group, and a log.

If it is not ready in time, or ends early, the error shows the last lines of its log.
"""

import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from fedlens.errors import FedlensError
from fedlens.files import private_log

STOP_TIMEOUT_S = 10.0  # between SIGTERM and SIGKILL
POLL_S = 0.05  # between two checks of a process
LOG_LINES = 12  # shown when the process failed
ANSI_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
INFO_LINE = re.compile(r"(\S+ )?INFO\b")
# The shell becomes the command. A watcher in the same group reads from the parent's pipe: when the
# parent closes it or dies for any reason, the read ends and the watcher kills the whole group.
GUARDED = 'exec 3<&0; (read -r _ <&3; kill -s KILL 0) & exec "$@" 3<&- </dev/null'


class ChildProcess:
    """A command whose process group, with all its children, ends on `close` or with the parent."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        advice: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`advice`: text in the log of a failed start → what the error tells the user to do."""
        self.name = name
        self.log = log
        self.advice = advice
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with private_log(log) as stream:
            self._log_start = stream.tell()
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", GUARDED, "sh", *command],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                umask=0o077,  # its files are private: keys, messages, updates
            )
        assert self._process.stdin is not None
        self._guard = self._process.stdin
        self.pid = self._process.pid  # also the id of its process group

    def exit_code(self) -> int | None:
        """None while it runs; once it has ended, this also ends the rest of its group."""
        code = self._process.poll()
        if code is not None:
            self._guard.close()
        return code

    def output(self) -> str:
        """What it has written to its log since its start."""
        with self.log.open("rb") as stream:
            stream.seek(self._log_start)
            return ANSI_COLOURS.sub("", stream.read().decode(errors="replace"))

    def wait_until(self, ready: Callable[[], bool], *, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not ready():
            if (code := self.exit_code()) is not None:
                raise self._error(f"ended at its start (exit code {code})")
            if time.monotonic() > deadline:
                raise self._error(f"was not ready within {timeout:.0f} seconds")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Sends SIGTERM, without waiting."""
        if self.exit_code() is None:
            self._process.terminate()

    def close(self) -> None:
        self.stop()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self.exit_code() is None:
            if time.monotonic() > deadline:
                self._process.kill()
            time.sleep(POLL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _error(self, problem: str) -> FedlensError:
        output = self.output()
        advice = next((f": {todo}" for text, todo in self.advice.items() if text in output), "")
        lines = [line for line in output.splitlines() if line.strip()]
        relevant = [line for line in lines if not INFO_LINE.match(line)] or lines
        sentence = f"{self.name} {problem}{advice}. Its log {self.log} ends with:"
        return FedlensError("\n    ".join([sentence, *relevant[-LOG_LINES:]]))
