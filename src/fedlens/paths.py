"""Paths as people write them."""

import os
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """The path with ~ as a shell reads it: that of a user who is not known stays as it is.

    `Path.expanduser` raises a RuntimeError for such a user; a file that does not exist has its own
    sentence everywhere.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111
