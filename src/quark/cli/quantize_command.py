"""`quark quantize`: a float model and some data in, a quantized model and an account of it out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.calibration_option import Calibration, random_option
from quark.cli.config_option import DEFAULT_CONFIG, Change, parse_changes
from quark.cli.data_options import metric_option, preprocess_option
from quark.cli.pack_command import PROFILES
from quark.cli.terminal import say

if TYPE_CHECKING:
    from quark.measures import MeasureResult

DROP_EXCEEDED = 3
AUTO = "auto"
TARGETS = ("onnxruntime", "npu", "gpu", "size")  # of quark.search.Target, which takes a while to import


def known_profile(_: click.Context, option: click.Parameter, profile: str | None) -> str | None:
    """`--pack IN OUT` takes IN for a profile: a word that is none is found before OUT is missed."""
    if profile is not None and profile not in PROFILES:
        raise click.BadParameter(
            f"'{profile}' is no profile; expected {', '.join(PROFILES)}, or --pack behind IN and OUT", param=option
        )
    return profile


@click.command()
@click.argument("model_in", metavar="IN", type=click.Path(path_type=Path))
@click.argument("model_out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--config",
    default=DEFAULT_CONFIG,
    show_default=True,
    metavar="NAME|FILE.yaml|auto",
    help="A preset ('quark presets' lists them), a config file, or auto, which tries several presets and writes the "
    "best result.",
)
@click.option(
    "--target",
    "runs_on",
    type=click.Choice(TARGETS),
    metavar="|".join(TARGETS),
    help="What --config auto optimizes for. onnxruntime (the default): the fastest file on this machine. npu, gpu: the "
    "formats that these compute fastest. size: the smallest file.",
)
@click.option(
    "--calib",
    type=click.Path(path_type=Path),
    metavar="DIR|FILE.npz",
    help="Calibration data, typical of what the model will see: a folder of images, or arrays [n, ...] named after the "
    "model's inputs. Configurations that measure no ranges do not need it.",
)
@random_option
@click.option(
    "--num-calib",
    type=click.IntRange(min=1),
    metavar="N",
    help="Use N samples, evenly spaced over the sorted files (default: all).",
)
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Samples per inference run."
)
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
    "for outputs with classes, and 100 (1 - cosine) for other outputs; the worst output counts.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Labelled images, for --max-drop, --report and --config auto.",
)
@metric_option("Built-in measures compare the outputs on the held-out samples; functions load their own data.")
@click.option(
    "--report",
    "page",
    type=click.Path(path_type=Path),
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
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of the summary.")
def quantize(
    model_in: Path,
    model_out: Path,
    config: str,
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
    from quark.cli.drop import measured_drop
    from quark.cli.quantization import AutoQuantization, Quantization
    from quark.cli.report_command import check_page
    from quark.evaluate.datasets import check_data

    is_auto = config == AUTO
    if runs_on is not None and not is_auto:
        raise click.UsageError("--target is for --config auto: give that, or a preset without --target")
    if is_auto and changes:
        raise click.UsageError("--config auto chooses all options itself: leave --set out, or name a preset")
    if is_auto and pack is not None:
        raise click.UsageError("--config auto packs where that makes the file smaller: leave --pack out")
    if is_auto and calib is None:
        raise click.UsageError("--config auto needs data to judge by: give --calib, or name a preset")
    if is_auto and data is not None and metric is not None:
        raise click.UsageError("--data and --metric are two measures for --config auto: give one of them")
    if data is not None and max_drop is None and page is None and not is_auto:
        raise click.UsageError(
            "--data is for --max-drop and --report: give one of them, or compare afterwards with 'quark compare'"
        )
    if data is not None and metric is not None and page is None:
        raise click.UsageError("--data and --metric are two measures for --max-drop: give one of them")
    calibration = Calibration(calib, num_calib, batch_size, preprocess, is_random)
    if page is not None and calib is None and not is_random:
        raise click.UsageError("--report compares the models on data: give --calib, or --random")
    if page is not None:
        check_page(page, model_in, model_out, calib, data, config, preprocess)
    if data is not None:
        check_data(data)
    if is_auto:
        search = AutoQuantization(model_in, model_out, runs_on or TARGETS[0], calibration, metric, max_drop, data)
        found = search.run()
        search.show(found, as_json)
        if found.model is None:
            raise SystemExit(DROP_EXCEEDED)
        if page is not None:
            _write_page(model_in, model_out, calibration, page, data, as_json, found.model.report.measure)
        return
    quantization = Quantization(model_in, model_out, config, changes, calibration, pack, metric)
    result = quantization.run()
    quantization.show(result, as_json)
    if page is not None:
        _write_page(model_in, model_out, calibration, page, data, as_json, result.report.measure)
    if max_drop is not None:
        drop = measured_drop(result.report, model_in, model_out, data, preprocess)
        if drop.points > max_drop:
            say(f"Error: {drop} lost, more than --max-drop {max_drop:g}", err=True)
            raise SystemExit(DROP_EXCEEDED)


def _write_page(
    model_in: Path,
    model_out: Path,
    calibration: Calibration,
    page: Path,
    data: Path | None,
    is_quiet: bool,
    measure: MeasureResult | None,
) -> None:
    from quark.cli.report_command import diagnose_and_write
    from quark.cli.report_facts import LabelledData

    labelled = None if data is None else LabelledData(data)
    diagnose_and_write(model_in, model_out, calibration, page, labelled, measure)
    if not is_quiet:
        say(f"report: {page}")
