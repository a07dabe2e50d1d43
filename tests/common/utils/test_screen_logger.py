"""ScreenLogger does what scripts for AMD Quark expect of it."""

from __future__ import annotations

import logging

import pytest

from quark.common.utils.log import ScreenLogger
from quark.errors import InvalidValueError


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScreenLogger, "_loggers", [])
    monkeypatch.setattr(ScreenLogger, "_shared_level", None)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_levels_and_codes(capsys: pytest.CaptureFixture[str]) -> None:
    log = ScreenLogger("levels")
    log.debug("not shown")
    log.info("%d layers", 3)
    log.warning("careful")
    log.error("bad", error_code="QUARK_1")
    log.critical("worse")
    assert lines(capsys) == [
        "[QUARK-INFO]: 3 layers",
        "[QUARK-WARNING]: careful",
        "[QUARK-ERROR]: [Error Code: QUARK_1] bad",
        "[QUARK-CRITICAL]: worse",
    ]


def test_duplicates_are_dropped_if_asked_to(capsys: pytest.CaptureFixture[str]) -> None:
    log = ScreenLogger("duplicates")
    for _ in range(2):
        log.info("always")
        log.info("once", allow_duplicate=False)
    assert [line.split()[-1] for line in lines(capsys)] == ["always", "once", "always"]


def test_the_level_is_shared(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARK_LOG_LEVEL", "error")
    first = ScreenLogger("shared one")
    first.warning("not shown")
    ScreenLogger.set_shared_level(logging.DEBUG)
    first.debug("shown")
    ScreenLogger("shared two").debug("too")
    assert [line.split()[-1] for line in lines(capsys)] == ["shown", "too"]
    monkeypatch.setattr(ScreenLogger, "_shared_level", None)
    monkeypatch.setenv("QUARK_LOG_LEVEL", "loud")
    with pytest.raises(InvalidValueError, match="QUARK_LOG_LEVEL=loud: expected debug"):
        ScreenLogger("loud")


def test_names_in_messages_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    ScreenLogger("printable").info("node %s", "\x1b[31mred")
    assert "\x1b" not in lines(capsys)[0]


def test_exceptions_come_with_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    log = ScreenLogger("exceptions")
    try:
        int("no")
    except ValueError:
        log.exception("failed")
    found = lines(capsys)
    assert found[0] == "[QUARK-ERROR]: failed"
    assert found[-1].startswith("ValueError: invalid literal")
