"""What has to hold whenever something is refused: a message that tells, and a folder as it was."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import assert_one_line_error, run

OLD = b"what was here before"


def contents(folder: Path) -> dict[str, str]:
    """Every file and folder inside, hidden ones too, with a hash of what it holds."""
    return {
        str(each.relative_to(folder)): hashlib.sha256(each.read_bytes()).hexdigest() if each.is_file() else "no file"
        for each in sorted(folder.rglob("*"))
    }


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """That nothing in the folder changes, comes or goes: no output, no temporary name."""
    before = contents(folder)
    yield
    assert contents(folder) == before


def refused(call: Callable[[], object], error: type[Exception], words: Sequence[str]) -> str:
    """The message of the error that the call raises, which has to hold the words."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"
    return message


def command_refused(folder: Path, arguments: Sequence[object], words: Sequence[str], code: int = 1) -> None:
    """A command that ends with that status, says the words in one line, and leaves the folder as it was. A mistake in
    the command line (status 2) may also show the usage."""
    with untouched(folder):
        result = run(*arguments)
    if code == 1:
        assert_one_line_error(result, *words)
        return
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    missing = [word for word in words if word not in result.output]
    assert not missing, f"{missing} not in: {result.output}"
