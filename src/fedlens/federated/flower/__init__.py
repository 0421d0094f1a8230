"""Remote clients over Flower's message API (https://flower.ai): an optional dependency."""

from importlib.metadata import version
from importlib.util import find_spec

from fedlens.errors import FedlensError

FLOWER_VERSION = "1.41"  # as in pyproject.toml


def require() -> None:
    """Raises `FedlensError` unless Flower, in the supported version, and Ray are installed."""
    missing = [name for name in ("flwr", "ray") if find_spec(name) is None]
    if missing:
        raise FedlensError(
            f"Flower's engines need {' and '.join(missing)}: pip install 'fedlens[flower]'."
        )
    if not (installed := version("flwr")).startswith(f"{FLOWER_VERSION}."):
        raise FedlensError(
            f"fedlens supports Flower {FLOWER_VERSION}, but {installed} is installed: "
            "pip install 'fedlens[flower]'."
        )
