"""Real data and weights where they lie beside the checkout, and a cache of the session's own."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says more about what else the machine does than about the code.
settings.register_profile("steady", deadline=None, max_examples=50)
settings.load_profile("steady")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session", autouse=True)
def _surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDLENS_CACHE", str(tmp_path_factory.mktemp("cache")))
        for variable, name in (("FEDLENS_DATA", "data"), ("FEDLENS_WEIGHTS", "weights")):
            if variable not in os.environ and (SHARED / name).exists():
                patch.setenv(variable, str(SHARED / name))
        yield
