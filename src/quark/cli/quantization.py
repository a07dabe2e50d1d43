"""One quantization as the command line asks for it: what is run, what is shown, and how Python would say it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from quark.cli.calibration_option import Calibration
from quark.cli.config_option import Change, is_file_name, read_config
from quark.cli.terminal import say, say_json

if TYPE_CHECKING:
    from quark.onnx.quantization.quantizer import QuantizedModel
    from quark.report.console import Table
    from quark.search import AutoResult


@dataclass(frozen=True)
class Quantization:
    """From `source` to `target`, by a preset or file called `config` with some `changes`."""

    source: Path
    target: Path
    config: str
    changes: tuple[Change, ...] = ()
    calibration: Calibration = field(default_factory=Calibration)
    pack: str | None = None  # the profile of packed weights
    metric: str | None = None

    def run(self) -> QuantizedModel:
        """Quantize and write. What can be found wrong before the work is found before it."""
        from quark.onnx import quantize
        from quark.onnx.pack import profile_of

        self._check_files()
        if self.pack is not None:
            profile_of(self.pack)
        # by its name where nothing is changed, so that the report can call it that
        config = read_config(self.config, self.changes) if self.changes else self.config
        result = quantize(self.source, config=config, metric=self.metric, **self.calibration.arguments())
        result.save(self.target, self.pack)
        return result

    def _check_files(self) -> None:
        function = self.metric.rpartition(":")[0] if self.metric else None  # FILE.py:FUNCTION
        calibration = self.calibration
        check_files(self.source, self.target, self.config, calibration.path, calibration.preprocess, function)

    def show(self, result: QuantizedModel, as_json: bool = False) -> None:
        """The report as a summary, with the same thing said in Python; or all of it as JSON."""
        if as_json:
            say_json(result.report.to_json())
            return
        from quark.report.summary import print_summary

        print_summary(result.report)
        _say_written(self.target, self.python_lines())

    def python_lines(self) -> list[str]:
        """The program that does the same."""
        lines = ["import quark.onnx"]
        config = repr(self.config)
        if self.changes:
            config = "config"
            lines += self._config_lines()
        data = [f"{name}={value!r}" for name, value in self.calibration.arguments().items() if value is not None]
        measure = [] if self.metric is None else [f"metric={self.metric!r}"]
        arguments = ", ".join([repr(str(self.source)), *data, f"config={config}", *measure])
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


@dataclass(frozen=True)
class AutoQuantization:
    """From `source` to `target` by the configuration that suits `runs_on` best, which is found by trying. `labelled`
    are images with their classes, `max_drop` the user's own bound."""

    source: Path
    target: Path
    runs_on: str
    calibration: Calibration
    metric: str | None = None
    max_drop: float | None = None
    labelled: Path | None = None

    def run(self) -> AutoResult:
        """Search, and write the best. Progress goes to standard error, a line before and after each trial."""
        from quark.search import auto_quantize

        check_files(self.source, self.target, self.calibration.path, self.labelled)
        return auto_quantize(
            self.source,
            output=self.target,
            target=self.runs_on,
            metric=self.metric,
            max_drop=self.max_drop,
            labelled=self.labelled,
            on_progress=lambda text: say(text, err=True),
            **self.calibration.arguments(),
        )

    def show(self, result: AutoResult, as_json: bool = False) -> None:
        """The summary of the model that was taken and a table of what was tried; or the report as JSON."""
        if as_json:
            nothing = {"auto": result.to_dict()}
            say_json(nothing if result.model is None else result.model.report.to_json(), indent=1)
            return
        import sys

        from quark.report.console import Console
        from quark.report.quantities import count_of
        from quark.report.summary import print_summary

        if result.model is not None:
            print_summary(result.model.report)
            say()
        # a file has no edge that a table must keep to
        console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 120)
        for note in result.notes:
            console.say(f"note: {note}")
        value = "" if result.float_value is None else f", measure {result.float_value:.4g}"
        console.say(
            f"for {result.target.value}, {result.bound}; float: {result.float_bytes / 1e6:.2f} MB, "
            f"{result.float_ms:.2f} ms/sample{value}; judged on {result.judged_on}"
        )
        console.print(_table_of(result))
        for row in result.rows:
            if row.reason:
                console.say(f"{row.name}: {row.outcome}: {row.reason}")
        console.say(f"{'taken: ' if result.model is not None else ''}{result.statement}")
        trials = count_of(sum(row.trial is not None for row in result.rows), "trial")
        console.say(f"{trials} in {result.seconds:.0f} s")
        if result.model is not None:
            _say_written(self.target, self.python_lines())

    def python_lines(self) -> list[str]:
        """The program that does the same."""
        given = {**self.calibration.arguments(), "output": str(self.target), "target": self.runs_on}
        given |= {"metric": self.metric, "max_drop": self.max_drop}
        given |= {"labelled": None if self.labelled is None else str(self.labelled)}
        named = [f"{name}={value!r}" for name, value in given.items() if value is not None]
        return ["import quark.onnx", f"quark.onnx.auto_quantize({', '.join([repr(str(self.source)), *named])})"]


def _say_written(target: Path, program: list[str]) -> None:
    from quark.report.console import Console

    console = Console()
    console.say()
    console.say(f"written: {target}, {target.with_suffix('.json')}")
    console.say("the same in Python:")
    for line in program:
        console.say(f"    {line}", "dim")


def _table_of(result: AutoResult) -> Table:
    from quark.report.console import cell, plain_table

    table = plain_table()
    has_measure = result.bound.has_measure
    for heading in ("configuration", "verdict"):
        table.add_column(heading, no_wrap=True)
    for heading in (*(("measure", "drop %") if has_measure else ()), "time", "size", "s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in result.rows:
        figures = row.figures
        if figures is None or row.trial is None:
            continue
        value = figures.top1 if figures.value is None else figures.value
        table.add_row(
            cell(row.name),
            figures.verdict,
            *(("-" if value is None else f"{value:.4g}", f"{figures.drop:.2f}") if has_measure else ()),
            "-" if row.latency is None else f"{row.latency:.2f} x",
            f"{100 * figures.size_bytes / result.float_bytes:.1f} %",
            f"{row.trial.seconds:.1f}",
            row.outcome,
        )
    return table


def check_files(source: Path, target: Path, *others: str | Path | None) -> None:
    """Refuse a model that is not there, and an output that would overwrite a file that is read."""
    from quark.evaluate.network import checked_file
    from quark.onnx.save import check_output

    checked_file(source)
    check_output(target, source, *others)


def _python(value: object) -> str:
    """A value of --set as Python has it: QuantType.QInt8 is a member of an enum there, not text."""
    from quark.onnx.quantization.config.files import restored

    member = restored(value)
    return f"quark.onnx.{type(member).__name__}.{member.name}" if isinstance(member, Enum) else repr(value)
