import logging

import pytest

pytest.importorskip("flwr")

from fedlens.errors import FedlensError
from fedlens.experiments.flower import apps


@pytest.mark.parametrize(("error", "logged"), [(FedlensError("No."), 0), (ValueError("No."), 1)])
def test_flower_logs_no_traceback_of_an_error_that_is_a_sentence(
    error: Exception, logged: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As flwr's `run_serverapp` logs what a ServerApp raised."""
    logger = logging.getLogger("flwr")
    logger.addFilter(apps._is_not_ours)
    try:
        logger.log(logging.ERROR, "%s raised an exception", "ServerApp", exc_info=error)
        logger.log(logging.ERROR, "something else")
    finally:
        logger.removeFilter(apps._is_not_ours)
    assert len([one for one in caplog.records if one.exc_info]) == logged
    assert caplog.messages[-1] == "something else"
