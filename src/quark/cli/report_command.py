"""`quark report`: where a quantized model differs from the float one, and what to do about it, as one HTML page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.calibration_option import Calibration
from quark.cli.data_options import preprocess_option
from quark.errors import InvalidValueError

if TYPE_CHECKING:
    from quark.cli.report_facts import LabelledData
    from quark.diagnosis import Diagnosis

DEFAULT_SAMPLES = 64
PAGE_SUFFIXES = (".html", ".htm")


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--float",
    "float_model",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FLOAT",
    help="The model that MODEL was made of.",
)
@click.option(
    "--calib",
    type=click.Path(path_type=Path),
    metavar="DIR|FILE.npz",
    help="What the models are compared on: a folder of images, or arrays [n, ...] named like the inputs. Without it, "
    "random numbers.",
)
@click.option(
    "--num-calib",
    type=click.IntRange(min=1),
    default=DEFAULT_SAMPLES,
    show_default=True,
    metavar="N",
    help="N samples, evenly spaced over the sorted files.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="DIR|FILE.npz",
    help="Labelled samples, for accuracy: a folder for each class, or arrays with one called labels.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="N samples of --data, evenly spaced over all.")
@click.option(
    "--labels",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Lines NAME NUMBER: the classes of --data, a folder of images.",
)
@preprocess_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE.html",
    help="Where the page goes; MODEL with .html if not given.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all that the page holds as JSON; the page is written too.")
def report(
    model: Path,
    float_model: Path,
    calib: Path | None,
    num_calib: int,
    data: Path | None,
    limit: int | None,
    labels: Path | None,
    preprocess: str,
    output: Path | None,
    as_json: bool,
) -> None:
    """Write a page that shows where the quantized MODEL lost accuracy, layer by layer, and what to do about it.

    The page needs no network and opens from the disk.
    """
    from quark.cli.report_facts import LabelledData

    if data is None and (limit is not None or labels is not None):
        raise click.UsageError("--limit and --labels are about --data: give it too")
    page = output or model.with_suffix(".html")
    calibration = Calibration(calib, num_calib, preprocess=preprocess)
    labelled = None if data is None else LabelledData(data, limit, labels)
    diagnosis = diagnose_and_write(float_model, model, calibration, page, labelled)
    if as_json:
        click.echo(diagnosis.to_json())
        return
    for line in _summary(diagnosis):
        click.echo(line)
    click.echo(f"written: {page}")


def diagnose_and_write(
    float_model: Path,
    model: Path,
    calibration: Calibration,
    page: Path,
    data: LabelledData | None = None,
) -> Diagnosis:
    """Compare the models, write the page, and give what it says.

    Of `calibration` at most 64 samples are looked at where it does not say how many. What can be found wrong before the
    work is found before it.
    """
    from quark.onnx.save import write_text
    from quark.report.page import page_of

    check_page(page, float_model, model)
    counted = replace(calibration, count=calibration.count or DEFAULT_SAMPLES)
    diagnosis = _diagnosed(float_model, model, counted, data)
    write_text(page_of(diagnosis), page)
    return diagnosis


def check_page(page: Path, *models: Path) -> None:
    """That a page can be written there; found out before the work, not after."""
    from quark.onnx.save import check_output

    if page.suffix.lower() not in PAGE_SUFFIXES:
        raise InvalidValueError(f"page '{page}': expected a name that ends in .html, so that a browser opens it")
    for model in models:
        check_output(page, model)


def _diagnosed(float_model: Path, model: Path, calibration: Calibration, data: LabelledData | None) -> Diagnosis:
    from quark.cli.report_facts import lint_remarks, measured_accuracy, measured_speed
    from quark.cli.report_making import making_of
    from quark.evaluate import Network
    from quark.evaluate.network import checked_file
    from quark.onnx.diagnose import diagnose
    from quark.onnx.session import release_memory

    checked_file(model)
    if data is not None:
        data.open(Network(float_model), calibration.preprocess)  # wrong data is found before the work
    source = None if calibration.path is None else str(calibration.path)
    diagnosis = diagnose(
        checked_file(float_model), model, source, num_samples=calibration.count, preprocessing=calibration.preprocess
    )
    release_memory()  # what the layers took is not held beside what is measured next
    accuracy = None if data is None else measured_accuracy(float_model, model, data, calibration.preprocess)
    basis = diagnosis.basis
    if calibration.path is not None:
        basis = replace(basis, data=calibration.path.resolve().name)  # pages are passed on: no folders of somebody's
    return replace(
        diagnosis,
        basis=basis,
        accuracy=accuracy,
        speed=measured_speed(float_model, model, calibration),
        lint=lint_remarks(model),
        making=making_of(model, diagnosis.result, float_model, calibration, data),
    )


def _summary(diagnosis: Diagnosis) -> list[str]:
    """The verdict, the worst output, and the worst layers."""
    from quark.report.quantities import printable
    from quark.report.summary import sqnr_text

    doubt = ", on random numbers, which says little" if diagnosis.basis.is_random else ""
    lines = [f"{diagnosis.verdict.value.upper()}: {diagnosis.result.name} against {diagnosis.source.name}{doubt}"]
    lines += [
        f"output '{each.name}': SQNR in dB {sqnr_text(each.sqnr_db)}, cosine {each.cosine:.4f}"
        for each in sorted(diagnosis.outputs, key=lambda each: each.sqnr_db)[:3]
    ]
    if diagnosis.accuracy is not None:
        found = diagnosis.accuracy
        lines.append(
            f"top-1 {100 * found.float_top1:.2f} -> {100 * found.quantized_top1:.2f} % "
            f"(+- {100 * found.standard_error:.2f} points)"
        )
    lines += [
        f"sensitive: {each.name} ({each.op_type}), {100 * (each.share or 0):.1f} % of all"
        for each in diagnosis.ranked[:3]
        if each.share
    ]
    return [printable(line) for line in lines]
