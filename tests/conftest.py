"""Real data and weights where they lie beside the checkout, and a cache of the session's own."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from fedlens import plugins
from fedlens.registry import REGISTRIES

# How long an example takes says more about what else the machine does than about the code.
settings.register_profile("steady", deadline=None, max_examples=50)
settings.load_profile("steady")

TESTS = Path(__file__).resolve().parent
WHOLE_RUNS = {"golden", "integration"}  # folders of tests that run experiments from end to end
SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of whole runs are slow and go first, so that processes that share the tests end
    together. Where a single other test takes more than a second or two, it is marked itself."""

    def is_whole_run(item: pytest.Item) -> bool:
        return item.path.relative_to(TESTS).parts[0] in WHOLE_RUNS

    for item in filter(is_whole_run, items):
        item.add_marker(pytest.mark.slow)
    items.sort(key=is_whole_run, reverse=True)  # stable: files stay together


@pytest.fixture(scope="session", autouse=True)
def _surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDLENS_CACHE", str(tmp_path_factory.mktemp("cache")))
        for variable, name in (("FEDLENS_DATA", "data"), ("FEDLENS_WEIGHTS", "weights")):
            if variable not in os.environ and (SHARED / name).exists():
                patch.setenv(variable, str(SHARED / name))
        yield


@pytest.fixture
def no_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to be in, and nothing loaded from outside, neither before nor after."""
    monkeypatch.chdir(tmp_path)
    before = {kind: registry.added for kind, registry in REGISTRIES.items()}
    modules = set(sys.modules)
    for registry in REGISTRIES.values():
        registry.added = {}
    for name, value in (("_files", {}), ("_imported", {}), ("_entry_points_loaded", False)):
        monkeypatch.setattr(plugins, name, value)
    yield tmp_path
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]
    for kind, registry in REGISTRIES.items():
        registry.added = before[kind]
