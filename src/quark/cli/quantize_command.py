"""`quark quantize`: a float model and some data in, a quantized model and an account of it out."""

from __future__ import annotations

from pathlib import Path

import click

from quark.cli.calibration_option import Calibration
from quark.cli.config_option import DEFAULT_CONFIG, Change, parse_changes
from quark.cli.data_options import preprocess_option
from quark.cli.pack_command import PROFILES

DROP_EXCEEDED = 3


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
    metavar="NAME|FILE.yaml",
    help="A preset ('quark presets' lists them), or a file.",
)
@click.option(
    "--calib",
    type=click.Path(path_type=Path),
    metavar="DIR|FILE.npz",
    help="What the model will see: a folder of images, or arrays [n, ...] named like its inputs. Without it, random "
    "numbers.",
)
@click.option(
    "--num-calib",
    type=click.IntRange(min=1),
    metavar="N",
    help="N samples, evenly spaced over the sorted files; else all.",
)
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Samples a run of the model."
)
@preprocess_option
@click.option(
    "--set",
    "changes",
    multiple=True,
    callback=parse_changes,
    metavar="KEY=VALUE",
    help="Change a field (per_channel=true), an option (Percentile=99.99) or a part of one "
    "(MXAttributes.scale_rule=rceil). Repeatable.",
)
@click.option(
    "--max-drop",
    type=click.FloatRange(min=0),
    metavar="X",
    help="Exit with status 3 where more than X percentage points are lost; the files are written all the same. With "
    "--data: of top-1 accuracy. Else of equal predictions on held-out samples, 100 (1 - agreement), for outputs with "
    "classes, and 100 (1 - cosine) for others; the worst output counts.",
)
@click.option(
    "--data", type=click.Path(path_type=Path), metavar="DIR", help="Labelled images, for --max-drop and --report."
)
@click.option(
    "--report",
    "page",
    type=click.Path(path_type=Path),
    metavar="FILE.html",
    help="Also write a page that shows where accuracy was lost, layer by layer, and what to do about it.",
)
@click.option(
    "--pack",
    is_flag=False,
    flag_value=PROFILES[0],
    callback=known_profile,
    metavar="[PROFILE]",
    help="Store weights of block formats in their true width: portable (without PROFILE), custom or native.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of the summary.")
def quantize(
    model_in: Path,
    model_out: Path,
    config: str,
    calib: Path | None,
    num_calib: int | None,
    batch_size: int,
    preprocess: str,
    changes: tuple[Change, ...],
    max_drop: float | None,
    data: Path | None,
    page: Path | None,
    pack: str | None,
    as_json: bool,
) -> None:
    """Quantize the model IN and write it to OUT, with a report as JSON beside it.

    \b
    Exit status: 0 done, whatever the verdict
                 1 an error
                 2 a mistake in the command line
                 3 --max-drop exceeded
    """
    from quark.cli.drop import measured_drop
    from quark.cli.quantization import Quantization
    from quark.cli.report_command import check_page
    from quark.evaluate.datasets import check_data

    if data is not None and max_drop is None and page is None:
        raise click.UsageError(
            "--data is for --max-drop and --report: give one of them, or compare afterwards with 'quark compare'"
        )
    calibration = Calibration(calib, num_calib, batch_size, preprocess)
    quantization = Quantization(model_in, model_out, config, changes, calibration, pack)
    if page is not None:
        check_page(page, model_in, model_out)
    if data is not None:
        check_data(data)
    result = quantization.run()
    quantization.show(result, as_json)
    if page is not None:
        _write_page(model_in, model_out, calibration, page, data, as_json)
    if max_drop is not None:
        drop = measured_drop(result.report, model_in, model_out, data, preprocess)
        if drop.points > max_drop:
            click.echo(f"Error: {drop} lost, more than --max-drop {max_drop:g}", err=True)
            raise SystemExit(DROP_EXCEEDED)


def _write_page(
    model_in: Path, model_out: Path, calibration: Calibration, page: Path, data: Path | None, is_quiet: bool
) -> None:
    from quark.cli.report_command import diagnose_and_write
    from quark.cli.report_facts import LabelledData

    diagnose_and_write(model_in, model_out, calibration, page, None if data is None else LabelledData(data))
    if not is_quiet:
        click.echo(f"report: {page}")
