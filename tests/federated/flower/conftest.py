"""One SuperLink for all tests that need a real one."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    pytest.importorskip("flwr")
    from tests.federated.flower import links

    with links.started(tmp_path_factory.mktemp("federation")) as started:
        yield started
