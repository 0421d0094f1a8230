"""Real data and weights where they lie beside the checkout, and a cache of the session's own."""

import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from matplotlib.figure import Figure

from fedlens import plugins
from fedlens.registry import REGISTRIES
from fedlens.reporting.figures import report
from fedlens.reporting.figures.style import FORMATS

# How long an example takes says more about what else the machine does than about the code.
settings.register_profile("steady", deadline=None, max_examples=50)
settings.register_profile("few", deadline=None, max_examples=15)  # of `make test-fast`
settings.load_profile("steady")

TESTS = Path(__file__).resolve().parent
WHOLE_RUNS = {"golden", "integration"}  # folders of tests that run experiments from end to end
# Files whose tests wait for other processes more than they compute: one process has them all, while
# two cores are busy with the rest.
WAITING = {
    TESTS / file
    for file in (
        "federated/flower/deployment/test_processes.py",
        "federated/flower/deployment/test_submission.py",
        "integration/test_flower_cli.py",
        "integration/test_flower_deployment.py",
        "integration/test_suites.py",
        "suites/test_launch.py",
    )
}
# Files whose tests share a process that has imported torch (`zygote` in integration/conftest.py).
FORKED = {
    TESTS / "integration" / file
    for file in ("test_kill.py", "test_tune.py", "test_without_flower.py")
}
SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of whole runs are slow. Where a single other test takes more than a second or two, it
    is marked itself. Files that wait go first, then those with slow tests, so that processes that
    share the tests end together."""

    def is_whole_run(item: pytest.Item) -> bool:
        return item.path.relative_to(TESTS).parts[0] in WHOLE_RUNS

    for item in filter(is_whole_run, items):
        item.add_marker(pytest.mark.slow)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(  # stable
        key=lambda item: (item.path not in WAITING, not is_whole_run(item), item.path not in slow)
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Processes share the tests file by file; those that wait are one file to them, and those that
    share what takes long to start."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            together = {"waiting": WAITING, "forked": FORKED}
            return next((s for s in together if config.rootpath / file in together[s]), file)

    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def _surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        (cache / "synthetic").symlink_to(_drawn_images(tmp_path_factory))
        patch.setenv("FEDLENS_CACHE", str(cache))
        for variable, name in (("FEDLENS_DATA", "data"), ("FEDLENS_WEIGHTS", "weights")):
            if variable not in os.environ and (SHARED / name).exists():
                patch.setenv(variable, str(SHARED / name))
        yield


def _drawn_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the synthetic benchmark: drawn once for all processes that share the tests."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "synthetic"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def unsaved_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report's figures are drawn, but their files are blank: saving them takes longest."""
    blank = io.BytesIO()
    Figure(figsize=(3, 2)).savefig(blank, format="pdf")

    def write(
        drawings: Sequence[report.Drawing], folder: Path, formats: Sequence[str] = FORMATS
    ) -> list[Path]:
        folder.mkdir(parents=True)
        paths = [folder / f"{drawing.name}.{form}" for drawing in drawings for form in formats]
        for drawing in drawings:
            drawing.draw()
        for path in paths:
            path.write_bytes(blank.getvalue())
        return paths

    monkeypatch.setattr(report, "write", write)


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
