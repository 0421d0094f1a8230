"""Flower carries the same clients to many processes and machines (https://flower.ai, message API).

An optional part: `require` says how to install it.
"""

from importlib.util import find_spec

from fedlens.errors import FedlensError


def require() -> None:
    """Refuses, in one sentence, to go on without Flower and Ray."""
    missing = [name for name in ("flwr", "ray") if find_spec(name) is None]
    if missing:
        raise FedlensError(
            f"engine=flower and engine=flower_simulation need {' and '.join(missing)}: "
            "pip install 'fedlens[flower]'."
        )
