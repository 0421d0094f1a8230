"""A child process that never outlives us: one command, a process group of its own, and a log.

It ends when we close it or when we die. One that is not ready by a deadline, or ends before, is
told of with the last lines of its log.
"""

import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from fedlens.errors import FedlensError

GRACE = 10.0  # seconds to end in good order after SIGTERM
LOOK = 0.05  # seconds between two looks at a process
LINES = 12  # of a log, shown when its process failed
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
CHATTER = re.compile(r"(\S+ )?INFO\b")
# The shell becomes the command. A watcher of the same group holds the other end of our pipe: when
# we close it or are gone, however that came about, it reads the end and kills the group and itself.
GUARDED = 'exec 3<&0; (read -r _ <&3; kill -s KILL 0) & exec "$@" 3<&- </dev/null'


class Child:
    """A command whose group, so also its own children, is gone after `close` or after our death."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        advice: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`advice` says what to do when certain words are in the log of a failed start."""
        self.name = name
        self.log = log
        self.advice = advice
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            self._begin = stream.tell()
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", GUARDED, "sh", *command],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                umask=0o077,  # what they keep is nobody else's: keys, messages, updates
            )
        assert self._process.stdin is not None
        self._guard = self._process.stdin
        self.pid = self._process.pid  # of the process, and the number of its group

    def ended(self) -> int | None:
        """The exit code, None while it runs; whatever is left of its group ends with it."""
        code = self._process.poll()
        if code is not None:
            self._guard.close()
        return code

    def said(self) -> str:
        """What it has written to its log since its start."""
        with self.log.open("rb") as stream:
            stream.seek(self._begin)
            return COLOURS.sub("", stream.read().decode(errors="replace"))

    def wait(self, ready: Callable[[], bool], *, patience: float) -> None:
        deadline = time.monotonic() + patience
        while not ready():
            if (code := self.ended()) is not None:
                raise FedlensError(self._account(f"ended at its start (exit code {code})"))
            if time.monotonic() > deadline:
                raise FedlensError(self._account(f"was not ready within {patience:.0f} seconds"))
            time.sleep(LOOK)

    def stop(self) -> None:
        """Asks it to end, without waiting."""
        if self.ended() is None:
            self._process.terminate()

    def close(self) -> None:
        self.stop()
        deadline = time.monotonic() + GRACE
        while self.ended() is None:
            if time.monotonic() > deadline:
                self._process.kill()
            time.sleep(LOOK)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _account(self, what: str) -> str:
        said = self.said()
        advice = next((f": {do}" for sign, do in self.advice.items() if sign in said), "")
        lines = [line for line in said.splitlines() if line.strip()]
        telling = [line for line in lines if not CHATTER.match(line)] or lines
        head = f"{self.name} {what}{advice}. Its log {self.log} ends with:"
        return "\n    ".join([head, *telling[-LINES:]])
