"""Where the package's log goes while something runs: `timestamp | level | message`."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

FORMAT = logging.Formatter("%(asctime)s | %(levelname)s | %(message)s")


@contextmanager
def logging_to(handler: logging.Handler) -> Iterator[None]:
    """Sends everything from INFO up to `handler`, in its own format if it has one."""
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
