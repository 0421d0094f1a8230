"""Send the package's log to a handler, as `timestamp | level | message`."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class LogFile(logging.FileHandler):
    """A log file that stops no run: what a full disk has no room for is not written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's own name)
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


FORMAT = logging.Formatter("%(asctime)s | %(levelname)s | %(message)s")


@contextmanager
def logging_to(handler: logging.Handler) -> Iterator[None]:
    """Send records from INFO up to `handler` while the context lasts, in its own format if set."""
    if handler.formatter is None:
        handler.setFormatter(FORMAT)
    logger = logging.getLogger("fedlens")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
