"""`quark report`: an HTML page that shows where a quantized model differs from the float one, and how to improve it.

`making_of` collects how the quantized file was made, as far as the file and the report next to it tell. The report is
used only if it has the hash of the model; a file from another tool has none.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from quark.account import FileFacts
from quark.card import Card
from quark.cli.options import (
    COUNT,
    DATA_PATHS,
    DEFAULT_PREPROCESS,
    PATH,
    Calibration,
    json_option,
    metric_option,
    preprocess_option,
    random_option,
)
from quark.cli.report_facts import LabelledData, lint_remarks, measured_accuracy, measured_quality, measured_speed
from quark.cli.terminal import say, say_json
from quark.compare import Verdict, worst_text
from quark.diagnosis import Diagnosis, Outcome, Step
from quark.errors import InvalidValueError, QuarkError
from quark.evaluate import Network
from quark.evaluate.network import checked_file
from quark.files.foreign import REPORT, parse_json, read_json
from quark.inspect.diagnose import diagnose
from quark.measures import Measure, MeasureResult
from quark.onnx.load.reading import read_proto
from quark.onnx.quantization.config.config import get_default_config
from quark.onnx.quantization.config.content import plain
from quark.onnx.quantization.making import command_of, preset_and_changes, read_card, set_arguments
from quark.onnx.quantization.presets import PRESETS
from quark.onnx.quantization.suggestions import try_all
from quark.onnx.save import check_output, write_text
from quark.onnx.session import release_memory
from quark.report.page import page_of
from quark.report.summary import sqnr_text
from quark.text import shell_command

DEFAULT_SAMPLES = 64
PAGE_SUFFIXES = (".html", ".htm")
MOST_SUGGESTIONS = 3
METADATA = "quark."  # prefix of quark's entries in a model's metadata
MOST_CHANGES = 20  # more differences than this mean that a preset is not similar

TRY_HELP = (
    "Quantize again with each suggestion, and show only those that help, with their gain. This is the default if the "
    "verdict is not ok and {model} records how it was made."
)


@click.command()
@click.argument("model", type=PATH)
@click.option(
    "--float",
    "float_model",
    required=True,
    type=PATH,
    metavar="FLOAT",
    help="The float model that MODEL was made from.",
)
@click.option(
    "--calib",
    type=PATH,
    metavar=DATA_PATHS,
    help="Data to compare the models on: a folder of images, or arrays [n, ...] named after the inputs.",
)
@random_option
@click.option(
    "--num-calib",
    type=COUNT,
    default=DEFAULT_SAMPLES,
    show_default=True,
    metavar="N",
    help="Use N samples, evenly spaced over the sorted files.",
)
@click.option(
    "--data",
    type=PATH,
    metavar=DATA_PATHS,
    help="Labelled samples to measure accuracy: one folder per class, or arrays, one of them called labels.",
)
@click.option("--limit", type=COUNT, metavar="N", help="Use N evenly spaced samples of --data.")
@click.option(
    "--labels",
    type=PATH,
    metavar="FILE",
    help="Classes of --data, if that is a folder of images: a text file with lines 'NAME NUMBER'.",
)
@preprocess_option
@metric_option("Built-in measures compare the outputs on --calib; functions load their own data.")
@click.option(
    "--try/--no-try",
    "is_trying",
    default=None,
    help=TRY_HELP.format(model="the model") + " It roughly doubles the time.",
)
@click.option(
    "-o",
    "--output",
    type=PATH,
    metavar="FILE.html",
    help="File to write (default: MODEL with the suffix .html).",
)
@json_option("Print the content of the page as JSON; the page is still written.")
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
    for line in _summary(diagnosis, float_model, model, calibration):
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
    """Compare the models, write the page, and return its content.

    `measure` is a measure to take, or its result. `is_trying` is True to try suggestions, None to do so if the verdict
    is not ok. At most 64 samples are used if `calibration` does not say how many. Arguments are checked before the work
    starts.
    """

    others = [] if data is None else [data.path, data.labels]
    check_page(page, float_model, model, calibration.path, calibration.preprocess, *others)
    counted = replace(calibration, count=calibration.count or DEFAULT_SAMPLES)
    diagnosis = _diagnosed(float_model, model, counted, data, measure, is_trying)
    write_text(page_of(diagnosis), page)
    return diagnosis


def check_page(page: Path, *reads: str | Path | None) -> None:
    """Reject a page that cannot be written, or that would overwrite an input file."""

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
    start = time.monotonic()
    checked_file(model)
    if data is not None:
        data.open(Network(float_model), calibration.preprocess)  # to find mistakes before the work starts
    checked_file(float_model)
    if calibration.path is None and not calibration.is_random:
        raise InvalidValueError(
            "the models are compared on data: give --calib, or ask for random numbers with --random"
        )
    # first, because a user's function may have mistakes, and comparing layers takes minutes
    if isinstance(measure, Measure):
        measure = measured_quality(float_model, model, measure, calibration)
    diagnosis = diagnose(
        float_model,
        model,
        calibration.source,
        num_samples=calibration.count,
        preprocessing=calibration.preprocess,
        use_random_data=calibration.is_random,
    )
    release_memory()  # before the next measurements
    accuracy = None if data is None else measured_accuracy(float_model, model, data, calibration.preprocess)
    speed = measured_speed(float_model, model, calibration)
    if is_trying or (is_trying is None and diagnosis.verdict is not Verdict.OK):
        diagnosis = with_suggestions(diagnosis, float_model, model, calibration, time.monotonic() - start)
    basis = diagnosis.basis
    if calibration.path is not None:
        basis = replace(basis, data=calibration.path.resolve().name)  # pages are shared, so no private paths
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
    """Quantize again with each suggestion, for about `seconds`, and keep those that help as advice."""

    def tell(number: int, count: int, text: str) -> None:
        if sys.stderr.isatty():
            say(f"trying {number} of {count}: {text}", err=True)

    tried = try_all(
        diagnosis,
        float_model,
        model,
        calibration.source,
        seconds=seconds,
        num_samples=calibration.count,
        preprocessing=calibration.preprocess,
        say=tell,
    )
    remarks = (*diagnosis.remarks, tried.note)
    return replace(diagnosis, steps=tried.steps, suggestions=tried.suggestions, remarks=remarks)


def suggestion_lines(diagnosis: Diagnosis, float_model: Path, model: Path, calibration: Calibration) -> list[str]:
    """Return the suggestions that helped, each with its command, and how many were tried; without trials, those that
    might help. Without knowledge of how the model was made, only the option is shown."""
    lines = []
    for step in diagnosis.steps[:MOST_SUGGESTIONS]:
        command = suggested_command(step, float_model, model, calibration)
        lines += [f"suggestion: {step.text}", f"  {command}"] if command else [f"suggestion: {step.line()}"]
    counts = {kind: sum(suggestion.outcome is kind for suggestion in diagnosis.suggestions) for kind in Outcome}
    tried = counts[Outcome.HELPED] + counts[Outcome.NO_GAIN]
    if tried:
        left = f", {counts[Outcome.UNTRIED]} were not" if counts[Outcome.UNTRIED] else ""
        lines.append(f"{tried} suggestions were tried, {counts[Outcome.HELPED]} helped{left}")
    return lines


def suggested_command(step: Step, float_model: Path, model: Path, calibration: Calibration) -> str:
    """Return the command that makes the model with a change. Empty if there is no change, or if how the model was made
    is unknown or cannot be written as a command."""
    try:
        card = read_card(model).card
    except InvalidValueError:
        return ""
    known = preset_and_changes(card.config)
    if not step.arguments or known is None or card.torch is not None:
        return ""
    output = model.with_name(f"{model.stem}_changed{model.suffix}")
    parts: list[str | Path] = ["quark", "quantize", float_model, output]
    if calibration.path is not None:
        parts += ["--calib", calibration.path]
    parts += [] if card.data.count is None else ["--num-calib", str(card.data.count)]
    parts += [] if card.data.batch_size == 1 else ["--batch-size", str(card.data.batch_size)]
    parts += [] if calibration.preprocess == DEFAULT_PREPROCESS else ["--preprocess", calibration.preprocess]
    parts += ["--random"] if calibration.is_random else []
    parts += ["--pack", card.packing] if card.packing else []
    if not step.arguments.startswith("--config "):
        parts += ["--config", known[0], *set_arguments(known[1])]
    return f"{shell_command(parts)} {step.arguments}"  # if an option has two values, the later one counts


def _summary(diagnosis: Diagnosis, float_model: Path, model: Path, calibration: Calibration) -> list[str]:
    """Return the verdict, the worst outputs, the most sensitive layers, and suggestions."""
    doubt = ", on random numbers, which is not informative" if diagnosis.basis.is_random else ""
    lines = [f"{diagnosis.verdict.value.upper()}: {diagnosis.result.name} against {diagnosis.source.name}{doubt}"]
    lines += [
        f"output '{output.name}': SQNR in dB {sqnr_text(output.sqnr_db)}, cosine {output.cosine:.4f}"
        for output in sorted(diagnosis.outputs, key=lambda output: -output.severity)[:3]
    ]
    if any(output.parts for output in diagnosis.outputs):
        lines.append(f"worst part: {worst_text(diagnosis.outputs)}")
    if diagnosis.accuracy is not None:
        accuracy = diagnosis.accuracy
        lines.append(
            f"top-1 {100 * accuracy.float_top1:.2f} -> {100 * accuracy.quantized_top1:.2f} % "
            f"(+- {100 * accuracy.standard_error:.2f} points)"
        )
    if diagnosis.measure is not None:
        lines.append(f"measure: {diagnosis.measure}")
    lines += [
        f"sensitive: {layer.name} ({layer.op_type}), {100 * (layer.share or 0):.1f} % of the output error"
        for layer in diagnosis.ranked[:3]
        if layer.share
    ]
    return lines + suggestion_lines(diagnosis, float_model, model, calibration)


def making_of(
    model: Path, facts: FileFacts, float_model: Path, calibration: Calibration, data: LabelledData | None = None
) -> dict[str, Any]:
    """Return what is known about how `model` was made, for the page's section "making".

    `command` rebuilds the file, if there is a card; `report_command` rebuilds the page; `config_changes` are the
    differences from the preset, or from the most similar one; `notes` say what is unknown, and why.
    """

    metadata = {entry.key: entry.value for entry in read_proto(model).metadata_props}
    beside, notes = _report_beside(model, facts)
    card = beside.get("card") or _json_of(metadata.get(f"{METADATA}card", ""))
    card = card if isinstance(card, Mapping) else {}
    config = beside.get("config") or card.get("config") or _json_of(metadata.get(f"{METADATA}config", ""))
    name = str(beside.get("config_name") or metadata.get(f"{METADATA}config_name", ""))
    command = ""
    if card:
        card_file = model.with_suffix(".json").name if beside.get("card") else model.name
        command = shell_command(["quark", "reproduce", Path(card_file)])
    else:
        notes.append(
            "There is no reproducibility card in the file or next to it, so no command is certain to rebuild it."
        )
    version = metadata.get(f"{METADATA}version")
    made = {
        "command": command,
        "report_command": _report_command(model, float_model, calibration, data),
        "made_by": _made_by(card),
        "config_name": name,
        **_configuration(name, config),
        "calibration": beside.get("calibration") or card.get("data"),
        "seeds": card.get("seeds"),
        "versions": beside.get("versions") or card.get("versions") or ({"quark": version} if version else {}),
        "platform": card.get("platform"),
        "packing": card.get("packing") or metadata.get(f"{METADATA}packing"),
        "hashes": {
            key.removeprefix(METADATA).removesuffix("_sha256"): value
            for key, value in metadata.items()
            if key.startswith(METADATA) and key.endswith("_sha256")
        },
        "algorithms": [_algorithm_line(algorithm) for algorithm in _mappings(beside.get("algorithms"))],
        "rewrites": [f"{rewrite.get('count')} {rewrite.get('name')}" for rewrite in _mappings(beside.get("rewrites"))],
        "notes": notes,
    }
    return {key: value for key, value in made.items() if value or key == "config_changes"}


def _report_beside(model: Path, facts: FileFacts) -> tuple[Mapping[str, Any], list[str]]:
    """Return the report of the run that wrote the model, and a note if the report is of another model."""
    path = model.with_suffix(".json")
    if not path.is_file():
        return {}, []
    try:
        content = read_json(path, path.name, REPORT)
    except InvalidValueError as error:
        return {}, [f"'{path.name}' beside the model is not the report of this file: {error}"]
    result = content.get("result") if isinstance(content, Mapping) else None
    if isinstance(content, Mapping) and isinstance(result, Mapping) and result.get("sha256") == facts.sha256:
        return content, []
    return {}, [f"'{path.name}' beside the model is not the report of this file: another hash, or none."]


def _json_of(text: str) -> Any:
    """Parse an entry of the model's metadata; None if it is not JSON, since metadata is untrusted."""
    try:
        return parse_json(text, "metadata") if text else None
    except InvalidValueError:
        return None


def _mappings(value: Any) -> list[Any]:
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []


def _made_by(card: Mapping[str, Any]) -> str:
    """Return the command that made the file. It is composed here, because cards are untrusted."""

    try:
        return command_of(Card.from_dict(card)) if card.get("command") else ""
    except QuarkError:
        return ""  # the card cannot be read


def _report_command(model: Path, float_model: Path, calibration: Calibration, data: LabelledData | None) -> str:
    """Return the command with file names only: pages are shared, and paths are private."""
    parts: list[str | Path] = ["quark", "report", Path(model.name), "--float", Path(float_model.name)]
    if calibration.path is not None:
        parts += ["--calib", calibration.path.resolve().name]
    if calibration.is_random:
        parts += ["--random"]
    if calibration.count is not None:
        parts += ["--num-calib", str(calibration.count)]
    if data is not None:
        parts += ["--data", data.path.resolve().name]
        parts += [] if data.limit is None else ["--limit", str(data.limit)]
        parts += [] if data.labels is None else ["--labels", data.labels.name]
    if calibration.preprocess != DEFAULT_PREPROCESS:
        parts += ["--preprocess", Path(calibration.preprocess).name]
    return shell_command(parts)


def _configuration(name: str, config: Any) -> dict[str, Any]:
    """Return the configuration and its differences from the preset called `name`, or else from the most similar one."""
    if not isinstance(config, Mapping):
        return {}

    here = dict(_flat(config))
    changes_of: dict[str, list[dict[str, Any]]] = {}
    for preset_name in [name] if name in PRESETS else PRESETS:
        preset = dict(_flat(plain(vars(get_default_config(preset_name)), "", str)))
        keys = sorted(key for key in {*preset, *here} if preset.get(key) != here.get(key))
        changes_of[preset_name] = [{"option": key, "preset": preset.get(key), "here": here.get(key)} for key in keys]
    nearest = min(changes_of, key=lambda preset_name: len(changes_of[preset_name]))
    if len(changes_of[nearest]) > MOST_CHANGES:
        return {"config": dict(config)}
    same = {} if nearest == name else {"nearest_preset": nearest}
    return {"config": dict(config), "config_changes": changes_of[nearest], **same}


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _algorithm_line(facts: Mapping[str, Any]) -> str:
    changed = facts.get("changed")
    count = len(changed) if isinstance(changed, list) else 0
    return f"{facts.get('name')}: {count or 'no'} change{'' if count == 1 else 's'}"
