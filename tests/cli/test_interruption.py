"""Ctrl-C on the command line."""

import os
import signal
import sys
import time
import weakref

import click
import pytest
from click.testing import CliRunner

from quark.cli.errors import ErrorReportingCommand


class _Freed:
    pass


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_an_interruption_that_python_drops_is_repeated():
    reached = []

    def interrupt(_):
        signal.raise_signal(signal.SIGINT)

    @click.command(cls=ErrorReportingCommand)
    def work():
        freed = _Freed()
        reference = weakref.ref(freed, interrupt)
        del freed
        reached.append(reference())  # Python has dropped the exception of the callback
        time.sleep(30)
        reached.append("end")

    hook = sys.unraisablehook
    result = CliRunner().invoke(work)
    assert reached == [None]
    assert result.exit_code == 1
    assert "Aborted!" in result.output
    assert "Exception ignored" not in result.output
    assert sys.unraisablehook is hook
