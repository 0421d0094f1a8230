import logging

import pytest

pytest.importorskip("flwr")

from fedlens.errors import FedlensError
from fedlens.experiments.flower import apps


@pytest.mark.parametrize(("error", "logged"), [(FedlensError("No."), 0), (ValueError("No."), 2)])
def test_flower_logs_nothing_about_an_error_that_is_a_sentence(
    error: Exception, logged: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As flwr's `run_serverapp` logs what a ServerApp raised, and that it ends."""
    logger, ours = logging.getLogger(__name__), apps._NotOurErrors()
    logger.addFilter(ours)
    try:
        logger.error("an error before it")
        logger.error("%s raised an exception", "ServerApp", exc_info=error)
        logger.error("Exit Code: 201")
        logger.warning("something else")
    finally:
        logger.removeFilter(ours)
    assert len(caplog.messages) == 2 + logged
    assert (caplog.messages[0], caplog.messages[-1]) == ("an error before it", "something else")
