"""One quantization as the command line asks for it: what is run, what is shown, and how Python would say it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.calibration_option import Calibration
from quark.cli.config_option import Change, is_file_name, read_config
from quark.errors import InvalidValueError

if TYPE_CHECKING:
    from quark.onnx.quantization.quantizer import QuantizedModel


@dataclass(frozen=True)
class Quantization:
    """From `source` to `target`, by a preset or file called `config` with some `changes`."""

    source: Path
    target: Path
    config: str
    changes: tuple[Change, ...] = ()
    calibration: Calibration = field(default_factory=Calibration)
    pack: str | None = None  # the profile of packed weights

    def run(self) -> QuantizedModel:
        """Quantize and write. What can be found wrong before the work is found before it."""
        from quark.onnx import quantize
        from quark.onnx.pack import profile_of

        self._check_files()
        if self.pack is not None:
            profile_of(self.pack)
        # by its name where nothing is changed, so that the report can call it that
        config = read_config(self.config, self.changes) if self.changes else self.config
        result = quantize(self.source, config=config, **self.calibration.arguments())
        result.save(self.target, self.pack)
        return result

    def _check_files(self) -> None:
        from quark.evaluate.network import checked_file
        from quark.onnx.save import check_output

        checked_file(self.source)
        check_output(self.target, self.source)
        report = self.target.with_suffix(".json")
        if report in (self.target, Path(self.config)):
            raise InvalidValueError(
                f"output '{self.target}': its report would overwrite '{report}'; choose another name"
            )

    def show(self, result: QuantizedModel, as_json: bool = False) -> None:
        """The report as a summary, with the same thing said in Python; or all of it as JSON."""
        if as_json:
            click.echo(result.report.to_json())
            return
        from rich.console import Console

        from quark.report.summary import print_summary

        print_summary(result.report)
        console = Console(highlight=False, soft_wrap=True)
        console.print(
            f"\nwritten: {self.target}, {self.target.with_suffix('.json')}\nthe same in Python:", markup=False
        )
        console.print("".join(f"    {line}\n" for line in self.python_lines()), end="", markup=False, style="dim")

    def python_lines(self) -> list[str]:
        """The program that does the same."""
        lines = ["import quark.onnx"]
        config = repr(self.config)
        if self.changes:
            config = "config"
            lines += self._config_lines()
        data = [f"{name}={value!r}" for name, value in self.calibration.arguments().items() if value is not None]
        arguments = ", ".join([repr(str(self.source)), *data, f"config={config}"])
        target = repr(str(self.target)) + ("" if self.pack is None else f", pack={self.pack!r}")
        return [*lines, f"quark.onnx.quantize({arguments}).save({target})"]

    def _config_lines(self) -> list[str]:
        from dataclasses import fields

        from quark.onnx.quantization.config.config import QuantizationConfig

        known = {each.name for each in fields(QuantizationConfig)}
        if is_file_name(self.config):
            lines = ["from quark.onnx.quantization.config.files import load_config"]
            lines.append(f"config = load_config({self.config!r})")
        else:
            lines = [f"config = quark.onnx.get_default_config({self.config!r})"]
        for key, value in self.changes:
            *outer, last = key.split(".") if key in known else ["extra_options", *key.split(".")]
            if not outer:
                lines.append(f"config.{last} = {_python(value)}")
                continue
            place = f"config.{outer[0]}" + "".join(f".setdefault({part!r}, {{}})" for part in outer[1:])
            lines.append(f"{place}[{last!r}] = {_python(value)}")
        return lines


def _python(value: object) -> str:
    """A value of --set as Python has it: QuantType.QInt8 is a member of an enum there, not text."""
    from quark.onnx.quantization.config.files import restored

    member = restored(value)
    return f"quark.onnx.{type(member).__name__}.{member.name}" if isinstance(member, Enum) else repr(value)
