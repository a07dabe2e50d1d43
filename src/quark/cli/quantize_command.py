"""`quark quantize`: read a float model and data, write a quantized model and a report."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quark.cli.file_commands import PROFILES
from quark.cli.options import (
    COUNT,
    DATA_PATHS,
    PATH,
    Calibration,
    Change,
    device_option,
    is_file_name,
    json_option,
    metric_option,
    parse_changes,
    preprocess_option,
    random_option,
    read_config,
)
from quark.cli.report_command import check_page, diagnose_and_write
from quark.cli.report_facts import LabelledData
from quark.cli.terminal import say, say_json
from quark.devices import Device
from quark.evaluate.comparison import measured_drop
from quark.evaluate.datasets import check_data
from quark.evaluate.network import checked_file
from quark.onnx import quantize as quantize_model
from quark.onnx.pack import profile_of
from quark.onnx.quantization.config.algorithm import AdaRoundConfig, DistillationConfig
from quark.onnx.quantization.config.config import QConfig, QuantizationConfig
from quark.onnx.quantization.config.content import restored
from quark.onnx.quantization.targets import Target, usual_config
from quark.onnx.save import check_output
from quark.report.console import Console, Table, cell, plain_table
from quark.report.quantities import count_of
from quark.report.summary import print_summary
from quark.search import auto_quantize

if TYPE_CHECKING:
    from quark.onnx.quantization.quantizer import QuantizedModel
    from quark.search import AutoResult

DROP_EXCEEDED = 3  # exit status
AUTO = "auto"
TARGETS = tuple(target.value for target in Target)
UNTRAINED = "A8W8"  # a preset without training, like all defaults of targets


class TargetName(click.Choice):  # type: ignore[type-arg]  # click 8.1 has no generic one
    """The targets, and 'onnxruntime', the earlier name of cpu, which is accepted and not offered."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return Target.CPU.value if value == "onnxruntime" else str(super().convert(value, param, ctx))


def known_profile(_: click.Context, option: click.Parameter, profile: str | None) -> str | None:
    """Reject an unknown profile. In `--pack IN OUT`, IN would be taken for the profile, and OUT reported as missing."""
    if profile is not None and profile not in PROFILES:
        raise click.BadParameter(
            f"'{profile}' is not a profile; expected {', '.join(PROFILES)}, or --pack after IN and OUT", param=option
        )
    return profile


@click.command()
@click.argument("model_in", metavar="IN", type=PATH)
@click.argument("model_out", metavar="OUT", type=PATH)
@click.option(
    "--config",
    metavar="NAME|FILE.yaml|auto",
    help="A preset ('quark presets' lists them), a config file, or auto, which tries several presets and writes the "
    "best result. Without it, --target chooses the preset.",
)
@click.option(
    "--target",
    "runs_on",
    type=TargetName(TARGETS),
    metavar="|".join(TARGETS),
    help="Where the model will run. cpu (the default): INT8_CNN_DEFAULT, or INT8_TRANSFORMER_DEFAULT for transformers. "
    "npu: XINT8, or BF16 for transformers. gpu: weights in float16. size: packed weights of 4 or 6 bits. With --config "
    "auto: what to optimize for.",
)
@click.option(
    "--calib",
    type=PATH,
    metavar=DATA_PATHS,
    help="Calibration data, typical of what the model will see: a folder of images, or arrays [n, ...] named after the "
    "model's inputs. Configurations that measure no ranges do not need it.",
)
@random_option
@click.option(
    "--num-calib",
    type=COUNT,
    metavar="N",
    help="Use N samples, evenly spaced over the sorted files (default: all).",
)
@click.option("--batch-size", type=COUNT, default=1, show_default=True, help="Samples per inference run.")
@preprocess_option
@click.option(
    "--set",
    "changes",
    multiple=True,
    callback=parse_changes,
    metavar="KEY=VALUE",
    help="Set a field (per_channel=true), an option (Percentile=99.99) or part of an option "
    "(MXAttributes.scale_rule=rceil). Repeatable.",
)
@click.option(
    "--max-drop",
    type=click.FloatRange(min=0),
    metavar="X",
    help="Exit with status 3 if more than X percentage points are lost; the files are still written. With --config "
    "auto: the largest loss allowed, instead of the default bound. With --metric: percent of that measure. With "
    "--data: points of top-1 accuracy. Otherwise points of equal predictions on held-out samples, 100 (1 - agreement), "
    "where near ties count as equal, for outputs with classes, and 100 (1 - cosine) for other outputs; the worst "
    "output counts.",
)
@click.option("--data", type=PATH, metavar="DIR", help="Labelled images, for --max-drop, --report and --config auto.")
@metric_option("Built-in measures compare the outputs on the held-out samples; functions load their own data.")
@click.option(
    "--report",
    "page",
    type=PATH,
    metavar="FILE.html",
    help="Also write an HTML report that shows where accuracy was lost, layer by layer, and what to do about it.",
)
@click.option(
    "--pack",
    is_flag=False,
    flag_value=PROFILES[0],
    callback=known_profile,
    metavar="[PROFILE]",
    help="Store block-format weights at their true bit width. PROFILE is portable (the default), custom or native.",
)
@device_option("Where networks are run and trained: everything that is measured, and the verdict.")
@json_option("Print the report as JSON instead of the summary.")
def quantize(
    model_in: Path,
    model_out: Path,
    config: str | None,
    runs_on: str | None,
    calib: Path | None,
    is_random: bool,
    num_calib: int | None,
    batch_size: int,
    preprocess: str,
    changes: tuple[Change, ...],
    max_drop: float | None,
    data: Path | None,
    metric: str | None,
    page: Path | None,
    pack: str | None,
    device: str,
    as_json: bool,
) -> None:
    """Quantize the model IN and write it to OUT.

    A report in JSON is written next to OUT.

    \b
    Exit status: 0 success, whatever the verdict
                 1 an error
                 2 invalid command line
                 3 --max-drop exceeded; with --config auto: no candidate
                   is within the bound, and nothing is written
    """

    is_auto = config == AUTO
    conflicts = (
        (
            runs_on is not None and not is_auto and config is not None,
            f"--target chooses the preset, and --config {config} names one: give one of them, or --config auto",
        ),
        (is_auto and bool(changes), "--config auto chooses all options itself: leave --set out, or name a preset"),
        (
            is_auto and device != "cpu",
            "--config auto times networks on the CPU: leave --device out, or name a preset",
        ),
        (is_auto and pack is not None, "--config auto packs where that makes the file smaller: leave --pack out"),
        (is_auto and calib is None, "--config auto needs data to judge by: give --calib, or name a preset"),
        (
            is_auto and data is not None and metric is not None,
            "--data and --metric are two measures for --config auto: give one of them",
        ),
        (
            data is not None and max_drop is None and page is None and not is_auto,
            "--data is for --max-drop and --report: give one of them, or compare afterwards with 'quark compare'",
        ),
        (
            data is not None and metric is not None and page is None,
            "--data and --metric are two measures for --max-drop: give one of them",
        ),
    )
    for is_conflict, message in conflicts:
        if is_conflict:
            raise click.UsageError(message)
    calibration = Calibration(calib, num_calib, batch_size, preprocess, is_random)
    if page is not None and calib is None and not is_random:
        raise click.UsageError("--report compares the models on data: give --calib, or --random")
    if page is not None:
        check_page(page, model_in, model_out, calib, data, config or "", preprocess)
    if data is not None:
        check_data(data)
    job: Quantization | AutoQuantization
    if is_auto:
        job = AutoQuantization(model_in, model_out, runs_on or TARGETS[0], calibration, metric, max_drop, data)
    else:
        changes = (*changes, *device_changes(config, changes, device))
        job = Quantization(model_in, model_out, config, changes, calibration, pack, metric, runs_on)
    model = job.run(as_json)
    if model is None:
        raise SystemExit(DROP_EXCEEDED)
    if page is not None:
        labelled = None if data is None else LabelledData(data)
        diagnose_and_write(model_in, model_out, calibration, page, labelled, model.report.measure)
        if not as_json:
            say(f"report: {page}")
    if max_drop is not None and not is_auto:
        drop = measured_drop(model.report, model_in, model_out, data, preprocess)
        if drop.points > max_drop:
            say(f"Error: {drop} lost, more than --max-drop {max_drop:g}", err=True)
            raise SystemExit(DROP_EXCEEDED)


def device_changes(config: str | None, changes: tuple[Change, ...], device: str) -> tuple[Change, ...]:
    """The changes to a config that --device stands for, except where --set, or an entry of `algo_config`, names another
    device."""
    if device == "cpu":
        return ()
    index = Device.parse(device).index
    changed = read_config(config or UNTRAINED, changes)
    torch_device = f"cuda:{index}"  # torch calls AMD's GPUs cuda as well
    wanted: list[Change] = [("InferDevice", device)]
    if isinstance(changed, QConfig):  # entries have devices of their own, which an option would contradict
        entries = [
            replace(algorithm, optim_device=device)
            if isinstance(algorithm, AdaRoundConfig) and algorithm.optim_device == "cpu"
            else replace(algorithm, device=torch_device)
            if isinstance(algorithm, DistillationConfig) and algorithm.device == "cpu"
            else algorithm
            for algorithm in changed.algo_config
        ]
        if entries != changed.algo_config:
            wanted.append(("algo_config", QConfig(algo_config=entries).to_dict()["algo_config"]))
    if getattr(changed, "include_fast_ft", False):
        wanted.append(("FastFinetune.OptimDevice", device))
    if changed.extra_options.get("Distillation"):
        wanted.append(("DistillationDevice", torch_device))
    given = {key for key, _ in changes}
    return tuple(change for change in wanted if change[0] not in given)


@dataclass(frozen=True)
class Quantization:
    """One quantization with the preset or file `config`, or with the default for `runs_on`, and with some `changes`."""

    source: Path
    target: Path
    config: str | None = None
    changes: tuple[Change, ...] = ()
    calibration: Calibration = field(default_factory=Calibration)
    pack: str | None = None  # profile of packed weights
    metric: str | None = None
    runs_on: str | None = None

    def run(self, as_json: bool = False) -> QuantizedModel:
        """Quantize, write, and print the summary or the report as JSON. Arguments are checked before any work."""

        function = self.metric.rpartition(":")[0] if self.metric else None  # FILE.py:FUNCTION
        calibration = self.calibration
        _check_files(self.source, self.target, self.config or "", calibration.path, calibration.preprocess, function)
        pack = self.pack
        if pack is not None:
            profile_of(pack)
        elif self.config is None and self.changes:
            pack = usual_config(self.runs_on or TARGETS[0], self.source).pack
        model = quantize_model(self.source, metric=self.metric, **self._chosen(), **calibration.arguments())
        model.save(self.target, pack)
        if as_json:
            say_json(model.report.to_json())
        else:
            print_summary(model.report)
            _say_written(self.target, self.python_lines())
        return model

    def _chosen(self) -> dict[str, Any]:
        """The arguments that choose the configuration."""
        if self.changes:
            return {"config": read_config(*self._base())}
        # pass the name if nothing is changed, so that the report can name the preset
        return {"target": self.runs_on} if self.config is None else {"config": self.config}

    def _base(self) -> tuple[str, tuple[Change, ...]]:
        """The preset or file, and all changes to it, the target's first."""
        if self.config is not None:
            return self.config, self.changes
        usual = usual_config(self.runs_on or TARGETS[0], self.source)
        return usual.preset, (*usual.options.items(), *self.changes)

    def python_lines(self) -> list[str]:
        """Return the equivalent Python program."""
        data = [f"{name}={value!r}" for name, value in self.calibration.arguments().items() if value is not None]
        measure = [] if self.metric is None else [f"metric={self.metric!r}"]
        chosen = {"config": "config"} if self.changes else {k: repr(v) for k, v in self._chosen().items() if v}
        named = [f"{name}={value}" for name, value in chosen.items()]
        arguments = ", ".join([repr(str(self.source)), *data, *named, *measure])
        target = repr(str(self.target)) + ("" if self.pack is None else f", pack={self.pack!r}")
        config_lines = self._config_lines() if self.changes else []
        return ["import quark.onnx", *config_lines, f"quark.onnx.quantize({arguments}).save({target})"]

    def _config_lines(self) -> list[str]:
        """Return the lines that make the changed config."""

        known = {field.name for field in fields(QuantizationConfig)}
        base, changes = self._base()
        if is_file_name(base):
            lines = ["from quark.onnx.quantization.config.files import load_config"]
            lines.append(f"config = load_config({base!r})")
        else:
            lines = [f"config = quark.onnx.get_default_config({base!r})"]
        for key, value in changes:
            member = restored(value)  # 'QuantType.QInt8' is a member of an enum
            text = f"quark.onnx.{type(member).__name__}.{member.name}" if isinstance(member, Enum) else repr(value)
            *outer, last = key.split(".") if key in known else ["extra_options", *key.split(".")]
            if outer:
                place = f"config.{outer[0]}" + "".join(f".setdefault({part!r}, {{}})" for part in outer[1:])
                lines.append(f"{place}[{last!r}] = {text}")
            else:
                lines.append(f"config.{last} = {text}")
        return lines


@dataclass(frozen=True)
class AutoQuantization:
    """`--config auto`: find the best configuration for `runs_on` by trying candidates.

    `labelled` is a folder of images with their classes; `max_drop` is the user's own bound.
    """

    source: Path
    target: Path
    runs_on: str
    calibration: Calibration
    metric: str | None = None
    max_drop: float | None = None
    labelled: Path | None = None

    def run(self, as_json: bool = False) -> QuantizedModel | None:
        """Search, write the best model, and print a summary of the trials, or the report as JSON.

        Progress goes to standard error. Returns None if no candidate is within the bound.
        """

        _check_files(self.source, self.target, self.calibration.path, self.labelled)
        result = auto_quantize(
            self.source,
            output=self.target,
            target=self.runs_on,
            metric=self.metric,
            max_drop=self.max_drop,
            labelled=self.labelled,
            on_progress=lambda text: say(text, err=True),
            **self.calibration.arguments(),
        )
        if as_json:
            without_model = {"auto": result.to_dict()}
            say_json(without_model if result.model is None else result.model.report.to_json(), indent=1)
        else:
            self._show(result)
        return result.model

    def _show(self, result: AutoResult) -> None:
        if result.model is not None:
            print_summary(result.model.report)
            say()
        # wide enough for the table if the output is not a terminal
        console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 120)
        for note in result.notes:
            console.say(f"note: {note}")
        value = "" if result.float_value is None else f", measure {result.float_value:.4g}"
        console.say(
            f"for {result.target.value}, {result.bound}; float: {result.float_bytes / 1e6:.2f} MB, "
            f"{result.float_ms:.2f} ms/sample{value}; judged on {result.judged_on}"
        )
        console.print(_candidates_table(result))
        for row in result.rows:
            if row.reason:
                console.say(f"{row.name}: {row.outcome}: {row.reason}")
        console.say(f"{'taken: ' if result.model is not None else ''}{result.statement}")
        trials = count_of(sum(row.trial is not None for row in result.rows), "trial")
        console.say(f"{trials} in {result.seconds:.0f} s")
        if result.model is not None:
            _say_written(self.target, self.python_lines())

    def python_lines(self) -> list[str]:
        """Return the equivalent Python program."""
        given = {**self.calibration.arguments(), "output": str(self.target), "target": self.runs_on}
        given |= {"metric": self.metric, "max_drop": self.max_drop}
        given |= {"labelled": None if self.labelled is None else str(self.labelled)}
        named = [f"{name}={value!r}" for name, value in given.items() if value is not None]
        return ["import quark.onnx", f"quark.onnx.auto_quantize({', '.join([repr(str(self.source)), *named])})"]


def _candidates_table(result: AutoResult) -> Table:
    has_measure = result.bound.has_measure
    numbers = (*(("measure", "drop %") if has_measure else ()), "time", "size", "s")
    table = plain_table(("configuration", "verdict"), numbers, is_rigid=True)
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


def _say_written(target: Path, program: list[str]) -> None:
    console = Console()
    console.say()
    console.say(f"written: {target}, {target.with_suffix('.json')}")
    console.say("the same in Python:")
    for line in program:
        console.say(f"    {line}", "dim")


def _check_files(source: Path, target: Path, *others: str | Path | None) -> None:
    """Reject a model that does not exist, and an output that would overwrite an input file."""

    checked_file(source)
    check_output(target, source, *others)
