"""What the tools share: a command line with AMD's flags around one function.

INPUT, OUTPUT = Argument("--input", ...), Argument("--output", ...)
TOOL = ModelTool("what it does", INPUT, OUTPUT, change=a_function_of_a_model)
parse_args, convert = TOOL.parse_args, TOOL.convert
if __name__ == "__main__":
    TOOL.run()
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from quark.errors import ModelError, QuarkError
from quark.files.output import together
from quark.onnx.file_graph import read_message
from quark.onnx.input_files import check_unchanged
from quark.onnx.save import SaveOptions, check_output, write_model
from quark.report.console import Console
from quark.report.quantities import size_text


class Argument:
    """One argument of a tool, as `ArgumentParser.add_argument` takes it. A name without dashes is positional."""

    def __init__(self, name: str, about: str, **settings: Any) -> None:
        self.name = name
        self.settings = {**settings, "help": about}
        if name.startswith("-") and "default" not in settings and settings.get("action") is None:
            self.settings["required"] = True

    @property
    def key(self) -> str:
        """The name of the argument's value after parsing."""
        return self.name.lstrip("-")


EXTERNAL_DATA = Argument(
    "--save_as_external_data", "Write the weights to a file beside the model.", action="store_true"
)


@dataclass(frozen=True, init=False)
class Tool:
    """A program: a summary, arguments, and the function that gets the parsed arguments."""

    summary: str
    arguments: tuple[Argument, ...]
    work: Callable[[Namespace], None]

    def __init__(self, summary: str, *arguments: Argument, work: Callable[[Namespace], None]) -> None:
        object.__setattr__(self, "summary", summary)
        object.__setattr__(self, "arguments", arguments)
        object.__setattr__(self, "work", work)

    def parse_args(self, words: Sequence[str] | None = None, program: str | None = None) -> Namespace:
        """The parsed command line. Help and usage errors end the process, as usual with argparse.

        Positional arguments may also be given as flags (`--input FILE`), as AMD's documents do.
        """
        given = list(sys.argv[1:] if words is None else words)
        parser = ArgumentParser(program, description=self.summary)
        for argument in self.arguments:
            flag = f"--{argument.key}"
            if not argument.name.startswith("-") and any(word.partition("=")[0] == flag for word in given):
                parser.add_argument(flag, required=True, **argument.settings)
            else:
                parser.add_argument(argument.name, **argument.settings)
        return parser.parse_args(given)

    def run(self, words: Sequence[str] | None = None, program: str | None = None) -> None:
        """Run the tool. An error ends the process with status 1, after one line that says what is wrong."""
        args = self.parse_args(words, program)
        try:
            self.work(args)
        except QuarkError as error:
            sys.exit(f"Error: {error}")


class ModelTool(Tool):
    """A tool that reads the model of its first argument, applies `change`, and writes the result to its second.

    `change` gets the model, and the other arguments by keyword. It returns the new model; the old one may be changed.
    """

    def __init__(self, summary: str, *arguments: Argument, change: Callable[..., onnx.ModelProto]) -> None:
        source, target, *others = arguments

        def convert(args: Namespace) -> None:
            values = {
                argument.key: getattr(args, argument.key, argument.settings.get("default")) for argument in others
            }
            has_external_data = bool(values.pop(EXTERNAL_DATA.key, False))
            convert_file(
                getattr(args, source.key),
                getattr(args, target.key),
                lambda model: change(model, **values),
                has_external_data=has_external_data,
            )

        super().__init__(summary, *arguments, work=convert)

    @property
    def convert(self) -> Callable[[Namespace], None]:
        """The whole work on files, for parsed arguments."""
        return self.work


@contextmanager
def naming(source: str | os.PathLike[str]) -> Iterator[None]:
    """Put the name of the file into errors about its model."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"'{os.fspath(source)}': {error}") from error


def read_model(path: str | os.PathLike[str]) -> onnx.ModelProto:
    """A model with all its weights, checked. Raises ModelError if the file is not an ONNX model."""
    return read_message(path)[0].filled()


def convert_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    change: Callable[[onnx.ModelProto], onnx.ModelProto],
    *,
    has_external_data: bool = False,
) -> None:
    """Apply `change` to the model `source`, write the result to `target` completely or not at all, and print a line."""
    path = check_output(target, source, has_report=False)
    message, _, files = read_message(source)
    with naming(source):
        changed = change(message.filled())
    with together(path):
        check_unchanged(files)
        write(changed, source, path, has_external_data=has_external_data)


def write(
    model: onnx.ModelProto, source: str | os.PathLike[str], target: Path, *, has_external_data: bool = False
) -> None:
    """Write a model that was made from the file `source`, and print a line about it."""
    written = write_model(model, target, SaveOptions(has_external_data=has_external_data))
    Console().say(f"{os.fspath(source)} -> {target} ({size_text(written.bytes)})")


def convert_model(
    source: str | os.PathLike[str] | onnx.ModelProto,
    target: str | os.PathLike[str] | None,
    change: Callable[[onnx.ModelProto], onnx.ModelProto],
) -> onnx.ModelProto | None:
    """Apply `change` to a model or a file and return the result; with a target, write it there and return None."""
    if isinstance(source, onnx.ModelProto):
        if target is None:
            return change(source)
        write(change(source), source.graph.name or "model", check_output(target, has_report=False))
    elif target is None:
        model = read_model(source)
        with naming(source):
            return change(model)
    else:
        convert_file(source, target, change)
    return None
