"""`quark report`: where a quantized model differs from the float one, and what to do about it, as one HTML page."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.calibration_option import Calibration, random_option
from quark.cli.data_options import metric_option, preprocess_option
from quark.cli.terminal import say, say_json
from quark.errors import InvalidValueError

if TYPE_CHECKING:
    from quark.cli.report_facts import LabelledData
    from quark.diagnosis import Diagnosis
    from quark.measures import Measure, MeasureResult

DEFAULT_SAMPLES = 64
PAGE_SUFFIXES = (".html", ".htm")
MOST_SUGGESTIONS = 3


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--float",
    "float_model",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FLOAT",
    help="The float model that MODEL was made from.",
)
@click.option(
    "--calib",
    type=click.Path(path_type=Path),
    metavar="DIR|FILE.npz",
    help="Data to compare the models on: a folder of images, or arrays [n, ...] named after the inputs.",
)
@random_option
@click.option(
    "--num-calib",
    type=click.IntRange(min=1),
    default=DEFAULT_SAMPLES,
    show_default=True,
    metavar="N",
    help="Use N samples, evenly spaced over the sorted files.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="DIR|FILE.npz",
    help="Labelled samples to measure accuracy: one folder per class, or arrays, one of them called labels.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Use N evenly spaced samples of --data.")
@click.option(
    "--labels",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Classes of --data, if that is a folder of images: a text file with lines 'NAME NUMBER'.",
)
@preprocess_option
@metric_option("Built-in measures compare the outputs on --calib; functions load their own data.")
@click.option(
    "--try/--no-try",
    "is_trying",
    default=None,
    help="Quantize again with each suggestion, and show only those that help, with their gain. This is the default if "
    "the verdict is not ok and the model records how it was made. It roughly doubles the time.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE.html",
    help="File to write (default: MODEL with the suffix .html).",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the content of the page as JSON; the page is still written."
)
def report(
    model: Path,
    float_model: Path,
    calib: Path | None,
    is_random: bool,
    num_calib: int,
    data: Path | None,
    limit: int | None,
    labels: Path | None,
    preprocess: str,
    metric: str | None,
    is_trying: bool | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Write an HTML report on where accuracy was lost.

    The page shows the error of the quantized MODEL layer by layer, and what to do about it. It is one self-contained
    file that opens from disk, without network access.
    """
    from quark.cli.report_facts import LabelledData
    from quark.measures import Measure

    if data is None and (limit is not None or labels is not None):
        raise click.UsageError("--limit and --labels are about --data: give it too")
    page = output or model.with_suffix(".html")
    calibration = Calibration(calib, num_calib, preprocess=preprocess, is_random=is_random)
    labelled = None if data is None else LabelledData(data, limit, labels)
    measure = None if metric is None else Measure.of(metric)
    diagnosis = diagnose_and_write(float_model, model, calibration, page, labelled, measure, is_trying)
    if as_json:
        say_json(diagnosis.to_json())
        return
    for line in _summary(diagnosis):
        say(line)
    say(f"written: {page}")


def diagnose_and_write(
    float_model: Path,
    model: Path,
    calibration: Calibration,
    page: Path,
    data: LabelledData | None = None,
    measure: Measure | MeasureResult | None = None,
    is_trying: bool | None = None,
) -> Diagnosis:
    """Compare the models, write the page, and give what it says. `measure` is one to take, or its result.

    `is_trying` is True to try suggestions, None to do so if the verdict is not ok.

    Of `calibration` at most 64 samples are looked at where it does not say how many. What can be found wrong before the
    work is found before it.
    """
    from quark.onnx.save import write_text
    from quark.report.page import page_of

    others = [] if data is None else [data.path, data.labels]
    check_page(page, float_model, model, calibration.path, calibration.preprocess, *others)
    counted = replace(calibration, count=calibration.count or DEFAULT_SAMPLES)
    diagnosis = _diagnosed(float_model, model, counted, data, measure, is_trying)
    write_text(page_of(diagnosis), page)
    return diagnosis


def check_page(page: Path, *reads: str | Path | None) -> None:
    """Refuse a page that cannot be written, or that would overwrite a file that is read, before the work."""
    from quark.onnx.save import check_output

    if page.suffix.lower() not in PAGE_SUFFIXES:
        raise InvalidValueError(f"page '{page}': expected a name that ends in .html, so that a browser opens it")
    check_output(page, *reads, has_report=False)


def _diagnosed(
    float_model: Path,
    model: Path,
    calibration: Calibration,
    data: LabelledData | None,
    measure: Measure | MeasureResult | None,
    is_trying: bool | None,
) -> Diagnosis:
    from quark.cli.report_facts import lint_remarks, measured_accuracy, measured_quality, measured_speed
    from quark.cli.report_making import making_of
    from quark.evaluate import Network
    from quark.evaluate.network import checked_file
    from quark.fidelity import Verdict
    from quark.measures import Measure
    from quark.onnx.diagnose import diagnose
    from quark.onnx.session import release_memory

    start = time.monotonic()
    checked_file(model)
    if data is not None:
        data.open(Network(float_model), calibration.preprocess)  # wrong data is found before the work
    checked_file(float_model)
    if calibration.path is None and not calibration.is_random:
        raise InvalidValueError(
            "the models are compared on data: give --calib, or ask for random numbers with --random"
        )
    if isinstance(measure, Measure):  # first: the layers take minutes, and a function may have mistakes
        measure = measured_quality(float_model, model, measure, calibration)
    source = None if calibration.path is None else str(calibration.path)
    diagnosis = diagnose(
        float_model,
        model,
        source,
        num_samples=calibration.count,
        preprocessing=calibration.preprocess,
        use_random_data=calibration.is_random,
    )
    release_memory()  # what the layers took is not held beside what is measured next
    accuracy = None if data is None else measured_accuracy(float_model, model, data, calibration.preprocess)
    speed = measured_speed(float_model, model, calibration)
    if is_trying or (is_trying is None and diagnosis.verdict is not Verdict.OK):
        diagnosis = with_suggestions(diagnosis, float_model, model, calibration, time.monotonic() - start)
    basis = diagnosis.basis
    if calibration.path is not None:
        basis = replace(basis, data=calibration.path.resolve().name)  # pages are passed on: no folders of somebody's
    return replace(
        diagnosis,
        basis=basis,
        accuracy=accuracy,
        measure=measure,
        speed=speed,
        lint=lint_remarks(model),
        making=making_of(model, diagnosis.result, float_model, calibration, data),
    )


def with_suggestions(
    diagnosis: Diagnosis, float_model: Path, model: Path, calibration: Calibration, seconds: float
) -> Diagnosis:
    """Quantize again with each suggestion, for about so many seconds, and keep what helps as advice."""
    from quark.onnx.quantization.suggestions import try_all

    def tell(number: int, count: int, text: str) -> None:
        if sys.stderr.isatty():
            say(f"trying {number} of {count}: {text}", err=True)

    tried = try_all(
        diagnosis,
        float_model,
        model,
        None if calibration.path is None else str(calibration.path),
        seconds=seconds,
        num_samples=calibration.count,
        preprocessing=calibration.preprocess,
        say=tell,
    )
    return replace(
        diagnosis,
        steps=tried.steps,
        suggestions=tried.suggestions,
        remarks=(*diagnosis.remarks, tried.note),
    )


def suggestion_lines(diagnosis: Diagnosis, most: int = MOST_SUGGESTIONS) -> list[str]:
    """What helped, and how many suggestions were tried; without trials, what might."""
    from quark.diagnosis import Outcome

    lines = [f"suggestion: {line}" for line in diagnosis.advice[:most]]
    counts = {kind: sum(each.outcome is kind for each in diagnosis.suggestions) for kind in Outcome}
    tried = counts[Outcome.HELPED] + counts[Outcome.NO_GAIN]
    if tried:
        left = f", {counts[Outcome.UNTRIED]} were not" if counts[Outcome.UNTRIED] else ""
        lines.append(f"{tried} suggestions were tried, {counts[Outcome.HELPED]} helped{left}")
    return lines


def _summary(diagnosis: Diagnosis) -> list[str]:
    """The verdict, the worst output, and the worst layers."""
    from quark.fidelity import worst_text
    from quark.report.summary import sqnr_text

    doubt = ", on random numbers, which says little" if diagnosis.basis.is_random else ""
    lines = [f"{diagnosis.verdict.value.upper()}: {diagnosis.result.name} against {diagnosis.source.name}{doubt}"]
    lines += [
        f"output '{each.name}': SQNR in dB {sqnr_text(each.sqnr_db)}, cosine {each.cosine:.4f}"
        for each in sorted(diagnosis.outputs, key=lambda each: -each.severity)[:3]
    ]
    if any(output.parts for output in diagnosis.outputs):
        lines.append(f"worst part: {worst_text(diagnosis.outputs)}")
    if diagnosis.accuracy is not None:
        found = diagnosis.accuracy
        lines.append(
            f"top-1 {100 * found.float_top1:.2f} -> {100 * found.quantized_top1:.2f} % "
            f"(+- {100 * found.standard_error:.2f} points)"
        )
    if diagnosis.measure is not None:
        lines.append(f"measure: {diagnosis.measure}")
    lines += [
        f"sensitive: {each.name} ({each.op_type}), {100 * (each.share or 0):.1f} % of all"
        for each in diagnosis.ranked[:3]
        if each.share
    ]
    lines += suggestion_lines(diagnosis)
    return lines
