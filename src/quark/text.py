"""Text that is safe to show, to log and to paste into a shell.

Names of nodes, tensors and files come from untrusted models. Printed as they are, they could steer a terminal; pasted
as part of a command, they could run another one.

    printable       a name or message with its control characters shown as escapes
    shell_command   a command line from a list of arguments; every command that quark suggests is made by it
    setting         KEY=VALUE as an argument of --set
    json_value      a value that JSON can hold
    get_logger      a logger whose messages are printable
    silent          a block without messages
    PrintableStream standard output or standard error of the command line
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any, TextIO

_SHORT_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_COLOURS = re.compile(r"(\x1b\[[0-9;]*m)")


def printable(text: str) -> str:
    """Show characters that are not printable as escapes: control and formatting characters, line breaks of all kinds,
    spaces other than the usual one, and bytes of a file name that are not UTF-8.

    >>> printable("conv \\x1b[2J\\n\\u202e")
    'conv \\\\x1b[2J\\\\n\\\\u202e'
    """
    if text.isprintable():
        return text

    def escaped(character: str) -> str:
        if character.isprintable():
            return character
        code = ord(character)
        digits = f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
        return _SHORT_ESCAPES.get(character, digits)

    return "".join(map(escaped, text))


def one_line(text: object) -> str:
    """A message of another library as one printable line.

    >>> one_line(ValueError("expected ']'\\n   in line 3"))
    "expected ']' in line 3"
    """
    return printable(" ".join(str(text).split()))


def version_numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with, to compare it with others. Zeros at the end and suffixes are ignored.

    >>> version_numbers("2.13.1+cpu"), version_numbers("2.0rc1") == version_numbers("2")
    ((2, 13, 1), True)
    """
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match.group().split(".")] if match else [0]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def shell_command(arguments: Iterable[str | os.PathLike[str]]) -> str:
    r"""Join arguments to a command that a POSIX shell splits into exactly these.

    The command is one printable line. Arguments with characters that cannot be printed are written as $'...', which
    bash, zsh, ksh and POSIX.1-2024 read. A path that starts with a dash gets ./ in front, so that it is not taken for
    an option.

    >>> print(shell_command(["quark", "inspect", "it's.onnx"]))
    quark inspect 'it'"'"'s.onnx'
    >>> print(shell_command(["a\nb"]))
    $'a\012b'
    """
    return " ".join(_quoted(argument) for argument in arguments)


def _quoted(argument: str | os.PathLike[str]) -> str:
    text = os.fspath(argument)
    if not isinstance(argument, str) and text.startswith("-"):
        text = f"./{text}"
    if text.isprintable():
        return shlex.quote(text)
    parts = []
    for character in text:
        if character.isprintable() and character not in "\\'!":
            parts.append(character)
        else:  # octal digits, because shells differ in how many hexadecimal ones they read
            parts += [f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogateescape")]
    return f"$'{''.join(parts)}'"


def setting(key: str, value: Any) -> str:
    """KEY=VALUE as --set reads it: text as it is, other values as YAML on one line in which everything is printable.

    The YAML is JSON with the escapes of YAML, which has one for each character, also beyond U+FFFF.

    >>> setting("nodes_to_exclude", ["conv", "a\\x7fb"])
    'nodes_to_exclude=["conv", "a\\\\x7fb"]'
    """
    return f"{key}={value if isinstance(value, str) else printable(json.dumps(value, ensure_ascii=False))}"


def json_value(value: Any) -> Any:
    """Return a value that JSON can hold: NaN and infinities become text, enums their values, tuples lists.

    >>> json_value({"sqnr_db": float("inf"), "shape": (1, 2)})
    {'sqnr_db': 'inf', 'shape': [1, 2]}
    """
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class _PrintableMessages(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if not message.isprintable():
            record.msg, record.args = printable(message), ()
        return True


_PRINTABLE_MESSAGES = _PrintableMessages()


def get_logger(name: str) -> logging.Logger:
    """The logger of that name, with messages made printable before any handler sees them."""
    logger = logging.getLogger(name)
    logger.addFilter(_PRINTABLE_MESSAGES)  # adding it twice has no effect
    return logger


@contextmanager
def silent() -> Iterator[None]:
    """Log nothing under the name `quark` inside the block."""
    logger = logging.getLogger("quark")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


class PrintableStream:
    """Standard output or standard error with everything made printable, except line breaks.

    Colours pass if the stream is a terminal, or if FORCE_COLOR or TTY_COMPATIBLE is set; other control sequences do
    not. The error of a failed write names the stream; `ignores_failures` is True to go on without it.

    There is no attribute `buffer`: click would write UTF-8 to it if the encoding is ASCII.
    """

    def __init__(self, stream: TextIO, name: str, *, ignores_failures: bool = False) -> None:
        self.stream = stream
        self.name = name
        self._ignores_failures = ignores_failures
        wanted = os.environ.get("FORCE_COLOR") or os.environ.get("TTY_COMPATIBLE") == "1"
        self._has_colours = bool(wanted) or stream.isatty()

    def write(self, text: str) -> int:
        if not text.replace("\n", "").isprintable():
            parts = _COLOURS.split(text) if self._has_colours else [text]
            parts[::2] = ["\n".join(map(printable, part.split("\n"))) for part in parts[::2]]
            text = "".join(parts)
        try:
            return self.stream.write(text)
        except OSError as error:
            self._report(error)
            return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self._report(error)

    def _report(self, error: OSError) -> None:
        if not self._ignores_failures:
            raise OSError(error.errno, error.strerror, self.name) from error

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def close(self) -> None:
        self.stream.close()

    @property
    def closed(self) -> bool:
        return self.stream.closed

    @property
    def encoding(self) -> str:
        return self.stream.encoding

    @property
    def errors(self) -> str | None:
        return self.stream.errors
