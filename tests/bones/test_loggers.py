"""pytest finds the records of each library's loggers at the root."""

from __future__ import annotations

import logging

import pytest

from tests.support.loggers import catch_logs_at_the_root


def test_records_of_a_logger_that_did_not_propagate_are_found(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("a library's own")
    logger.propagate = False
    logger.warning("unheard")
    catch_logs_at_the_root()
    logger.warning("heard")
    assert caplog.messages == ["heard"]
    with caplog.at_level(logging.DEBUG, logger.name):
        logger.debug("heard, too")
    assert caplog.messages == ["heard", "heard, too"]
