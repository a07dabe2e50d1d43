"""The commands as tests call them."""

from __future__ import annotations

import inspect

from click.testing import CliRunner

from quark.cli.main import main

# click before 8.2 mixes what is written to the two unless told not to; later it has no such option
APART = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}


def run(*arguments):
    return CliRunner(**APART).invoke(main, [str(argument) for argument in arguments])


def assert_one_line_error(result, *fragments, code=1):
    """The exit status, one line on stderr that names the culprit, nothing on stdout."""
    assert result.exit_code == code, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("Error: ")
    assert "Traceback" not in result.output
    for fragment in fragments:
        assert fragment in lines[0], lines[0]
    assert result.stdout == ""
