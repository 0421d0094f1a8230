"""Send the package's log to a handler, as `timestamp | level | message`."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

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
