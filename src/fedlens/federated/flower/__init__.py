"""Flower carries the same clients to many processes and machines (https://flower.ai, message API).

An optional part: `require` says how to install it.
"""

from importlib.metadata import version
from importlib.util import find_spec

from fedlens.errors import FedlensError

FLOWER = "1.41"  # as in pyproject.toml


def require() -> None:
    """Refuses, in one sentence, to go on without Flower and Ray."""
    missing = [name for name in ("flwr", "ray") if find_spec(name) is None]
    if missing:
        raise FedlensError(
            f"engine=flower and engine=flower_simulation need {' and '.join(missing)}: "
            "pip install 'fedlens[flower]'."
        )
    if not (found := version("flwr")).startswith(f"{FLOWER}."):
        raise FedlensError(
            f"This is Flower {found}, and fedlens knows the inner parts of {FLOWER}: "
            "pip install 'fedlens[flower]'."
        )
