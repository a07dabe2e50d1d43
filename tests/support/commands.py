"""The commands as tests call them."""

from __future__ import annotations

from click.testing import CliRunner

from quark.cli.main import main


def run(*arguments):
    return CliRunner().invoke(main, [str(each) for each in arguments])


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
