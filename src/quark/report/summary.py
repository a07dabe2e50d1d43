"""The summary printed after a quantization, and advice on what to try next.

The verdict comes first, framed and coloured if it is bad, with advice. Then come sizes, formats, what stayed in float
and why, what was protected, calibration, algorithms, the error of each output, and remarks. Without a terminal it is
plain text of 80 columns. Long lists end in "and N more": the JSON beside the model has all.

Advice comes from the report alone. Presets that were measured to be ok come first; what was measured not to help is not
suggested.
"""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel

from quark.account import CalibrationFacts, Report
from quark.compare import OutputFidelity, Verdict, agreement_text, worst_text
from quark.features.mixed_precision.report import mixed_line, mixed_table
from quark.formats.catalog import FORMATS
from quark.plan import AffineChoice, BlockChoice, FloatChoice, Role, SkippedNode
from quark.report.algorithms import (
    BIAS_CORRECTION,
    CROSS_LAYER,
    MIXED_PRECISION,
    NPU_POSITIONS,
    SMOOTH,
    algorithm_line,
    idle_remark,
)
from quark.report.console import Console, Table, cell, plain_table
from quark.report.quantities import count_of, listed, size_text

MOST_OUTPUTS = 6
MOST_REASONS = 4
MOST_REMARKS = 5
MOST_LAYERS = 3
MOST_ADVICE = 3
FEW_SAMPLES = 32
PROTECTED = "protected: "  # prefix of the reasons that protection gives
PLURALS = {Role.ACTIVATION: "activations", Role.WEIGHT: "weights", Role.BIAS: "biases"}
COLOURS = {
    Verdict.OK: "green",
    Verdict.DEGRADED: "yellow",
    Verdict.COLLAPSED: "red",
    Verdict.UNCHECKED: "yellow",
}
MEANINGS = {
    Verdict.OK: "outputs agree with the float network",
    Verdict.DEGRADED: "Some outputs differ clearly from the float network's. Measure the task before using this file.",
    Verdict.COLLAPSED: "Outputs no longer follow the float network's. Do not use this file.",
    Verdict.UNCHECKED: "Nothing was compared with the float network, so the quality of this file is unknown.",
}
CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
PRODUCTS = CONVOLUTIONS | {"MatMul", "Gemm"}
NORMALIZATIONS = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})  # typical of a transformer


def print_summary(report: Report, console: Console | None = None) -> None:
    """Write the summary to a console, by default to stdout."""
    console = console or Console()
    for part in summary_parts(report, has_boxes=console.is_terminal):
        console.print(part)


def summary_text(report: Report, columns: int = 80) -> str:
    """Return the summary as plain text, with no line longer than `columns`."""
    stream = io.StringIO()
    print_summary(report, Console(file=stream, width=columns, force_terminal=False, color_system=None))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def report_json(report: Report) -> dict[str, Any]:
    """Return the content of the JSON file beside the model."""
    content: dict[str, Any] = json.loads(report.to_json())
    return content


def summary_parts(report: Report, has_boxes: bool) -> Iterator[RenderableType]:
    """Yield what rich prints: the verdict, the facts, the outputs, the remarks."""
    yield _verdict(report, has_boxes)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in _fact_rows(report):
        grid.add_row(name, cell(value))
    yield grid
    if report.outputs:
        yield ""
        yield _outputs(report.outputs)
        failing = [
            f"output '{output.name}' {part.text()}: {part.verdict.value}"
            for output in report.outputs
            for part in sorted(output.parts, key=lambda part: -part.severity)
            if part.verdict is not Verdict.OK and len(output.parts) > 1
        ]
        if failing:
            yield ""
            yield _remarks(failing, "failing part")
    if report.mixed is not None and report.mixed.layers:
        yield ""
        yield mixed_table(report.mixed)
    rows_of_their_own = (NPU_POSITIONS, MIXED_PRECISION)  # their remarks say something else
    said = {idle_remark(algorithm) for algorithm in report.algorithms if algorithm.name not in rows_of_their_own}
    remarks = [remark for remark in report.remarks if remark not in said]
    if remarks:
        yield ""
        yield _remarks(remarks)


def _verdict(report: Report, has_boxes: bool) -> RenderableType:
    verdict, colour, facts = report.verdict, COLOURS[report.verdict], report.calibration
    sample, samples = _judged_samples(facts)
    worst = worst_text(report.outputs, sample)
    if verdict is Verdict.OK:
        word = ("OK, PERHAPS: ", "bold yellow") if facts.is_random else ("OK: ", f"bold {colour}")
        doubt = ", which says little" if facts.is_random else ""
        reason = f"{MEANINGS[verdict]} on {samples}{doubt} (worst: {worst})"
        return cell("").append(*word).append_text(cell(reason))
    lines = [
        MEANINGS[verdict]
        if report.plan.tensors
        else "Nothing was quantized. The file computes what the float network computes."
    ]
    if worst:
        lines.append(f"Worst of {samples}: {worst}")
    lines += [f"- {tip}" if verdict is Verdict.UNCHECKED else f"- try: {tip}" for tip in advice(report)]
    return Panel(
        Group(*map(cell, lines)),
        title=f" {verdict.value.upper()} ",
        title_align="left",
        border_style=f"bold {colour}",
        box=box.HEAVY if has_boxes else box.ASCII,
    )


def _judged_samples(facts: CalibrationFacts) -> tuple[str, str]:
    """What a sample of the verdict is called, and how many there are."""
    if facts.judged:
        return "sample", f"{count_of(facts.judged, 'sample')}, {facts.held_out} of them held out"
    where = "calibration" if facts.is_verdict_on_calibration else "held-out"
    sample = f"{'random' if facts.is_random else where} sample"
    return sample, count_of(facts.samples if facts.is_verdict_on_calibration else facts.held_out, sample)


def _fact_rows(report: Report) -> Iterator[tuple[str, str]]:
    yield "file", f"{report.source.name}  {size_text(report.source.bytes)}"
    if report.result is not None:
        share = 100 * report.result.bytes / max(report.source.bytes, 1)
        size = size_text(report.result.bytes)
        yield "written", f"{report.result.name}  {size}, {share:.1f} % of the float file"
    if report.device != "cpu":
        yield "measured on", report.device
    if report.packing is not None:
        packing = report.packing
        weights = count_of(packing.weights, "weight")
        yield "packed", f"{weights} at {packing.bits_per_weight:.2f} bits, {packing.profile}"
    if report.measure is not None:
        yield "measure", str(report.measure)
    yield "config", report.config_name + (f", {report.chosen_by}" if report.chosen_by else "")
    for role in Role:
        formats = report.formats(role)
        if formats:
            yield PLURALS[role], listed(f"{count} {name}" for name, count in formats.items())
    op_types = Counter(report.op_types.get(node, "rewritten") for node in report.quantized_nodes)
    yield "quantized", _counts(op_types) or "nothing"
    yield from _with_heading("in float", _float_lines(report))
    yield from _with_heading("protected", _protected_lines(report))
    facts = report.calibration
    data = "RANDOM NUMBERS" if facts.is_random else facts.source
    if facts.methods:
        batches = f" in {count_of(facts.batches, 'run')}" if 0 < facts.batches < facts.samples else ""
        yield "calibration", f"{count_of(facts.samples, 'sample')}{batches} ({data}), {listed(facts.methods)}"
    elif facts.is_verdict_skipped:
        yield "calibration", "none needed"
    else:
        who = "algorithms and verdict" if report.algorithms else "verdict"
        yield "calibration", f"none needed; {who} on {data}"
    if facts.preprocessing:
        yield "images", facts.preprocessing
    if report.rewrites:
        yield "rewrites", listed(f"{rewrite.count} {rewrite.name.replace('_', ' ')}" for rewrite in report.rewrites)
    algorithms = (
        mixed_line(report.mixed) if algorithm.name == MIXED_PRECISION and report.mixed else algorithm_line(algorithm)
        for algorithm in report.algorithms
    )
    yield from _with_heading("algorithms", algorithms)


def _with_heading(heading: str, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield rows whose first one has a heading."""
    for index, line in enumerate(lines):
        yield "" if index else heading, line


def _counts(op_types: Counter[str]) -> str:
    return listed(f"{count} {name}" for name, count in op_types.most_common())


def _float_lines(report: Report) -> Iterator[str]:
    """Yield what stayed in float: a line for each reason, the most common first."""
    ordered = _by_reason(node for node in report.plan.skipped if not node.reason.startswith(PROTECTED))
    for reason, op_types in ordered[:MOST_REASONS]:
        yield f"{_counts(op_types)}: {reason}"
    if len(ordered) > MOST_REASONS:
        rest = sum(op_types.total() for _, op_types in ordered[MOST_REASONS:])
        yield f"and {count_of(rest, 'node')} for {count_of(len(ordered) - MOST_REASONS, 'other reason')}"


def _rows_of_float_nodes(report: Report) -> str:
    """The rows of the summary that say why nodes stayed in float, for reading."""
    is_protected = {node.reason.startswith(PROTECTED) for node in report.plan.skipped}
    rows = [name for name, each in (("'in float'", False), ("'protected'", True)) if each in is_protected]
    return " or ".join(rows) or "the report"


def _by_reason(nodes: Iterable[SkippedNode]) -> list[tuple[str, Counter[str]]]:
    """Return reasons and the operators of their nodes, the most common reason first."""
    by_reason: dict[str, Counter[str]] = {}
    for node in nodes:
        # reasons that differ only in the operator are the same
        reason = node.reason.replace(f"operator type {node.op_type}", "operator type")
        by_reason.setdefault(reason, Counter())[node.op_type] += 1
    return sorted(by_reason.items(), key=lambda item: -item[1].total())


def _protected_lines(report: Report) -> Iterator[str]:
    """Yield what protection kept out of 8 bits and why, its cost, and the wider presets that were measured."""
    facts = report.protection
    if facts is None:
        return
    layers = {layer.node for layer in facts.layers}
    nodes = (node for node in report.plan.skipped if node.reason.startswith(PROTECTED) and node.node not in layers)
    for reason, op_types in _by_reason(nodes):
        yield f"{_counts(op_types)}: {reason.removeprefix(PROTECTED)}"
    if facts.layers:
        names = [f"'{layer.node}' ({layer.op_type}, {_percent(layer.mac_share)})" for layer in facts.layers]
        title = f"{count_of(len(names), 'sensitive layer')} in float, with percent of all multiply-accumulates"
        yield f"{title}: {listed(names, MOST_LAYERS)}"
    if facts.methods:
        yield f"ranges chosen by the outputs: {listed(f'{n} {name}' for name, n in facts.methods.items())}"
    if facts.float_mac_share or facts.extra_weight_bytes:
        share = f"{_percent(facts.float_mac_share)} of multiply-accumulates are not in 8 bits"
        yield f"{share}, which adds {size_text(facts.extra_weight_bytes)} of weights"
    if facts.tried:
        before = facts.before.partition(" ")[2]  # without the severity
        outcome = f"without protection: {before}" if facts.after else "no change in 8 bits was better"
        yield f"{count_of(len(facts.tried), 'network')} tried; {outcome}"
    if report.verdict is not Verdict.OK:
        for name, figures in _measured_alternatives(report):
            yield f"{name} was measured ok: {figures}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _outputs(outputs: tuple[OutputFidelity, ...]) -> RenderableType:
    table = plain_table(("output",), ("cosine", "SQNR dB", "same class", "largest error"))
    table.add_column("verdict")
    worst_first = sorted(outputs, key=lambda output: -output.severity) if len(outputs) > MOST_OUTPUTS else outputs
    for output in worst_first[:MOST_OUTPUTS]:
        figures = (f"{output.cosine:.4f}", sqnr_text(output.sqnr_db), agreement_text(output), f"{output.max_error:.3g}")
        table.add_row(cell(output.name), *figures, cell(output.verdict.value, COLOURS[output.verdict]))
    if len(outputs) > MOST_OUTPUTS:
        table.add_row(f"and {len(outputs) - MOST_OUTPUTS} more, all better")
    return table


def sqnr_text(sqnr_db: float) -> str:
    """Return decibels as text.

    >>> sqnr_text(float("inf")), sqnr_text(12.345)
    ('exact', '12.3')
    """
    if math.isinf(sqnr_db):
        return "exact" if sqnr_db > 0 else "-inf"
    return f"{sqnr_db:.1f}"


def _remarks(remarks: Iterable[str], noun: str = "remark") -> RenderableType:
    lines = [f"- {line}" for line in remarks]
    if len(lines) > MOST_REMARKS:
        left = count_of(len(lines) - MOST_REMARKS, f"more {noun}")
        lines[MOST_REMARKS:] = [f"- and {left} in the JSON beside the model"]
    return Group(*map(cell, lines))


def advice(report: Report) -> list[str]:
    """Return at most three things to try, the most promising first."""
    if report.verdict is Verdict.OK:
        return []
    if report.calibration.is_verdict_skipped:
        return ["compare the two files on a machine with enough memory: 'quark compare IN OUT --data DIR'"]
    if not report.plan.tensors:
        if any(node.op_type in ("If", "Loop", "Scan") for node in report.plan.skipped):
            return ["quantize what is inside If, Loop and Scan too: --set EnableSubgraph=true"]
        return [f"{_rows_of_float_nodes(report)} below has the reason for each node"]
    if report.calibration.is_network_random:
        return ["measure the task by a function of your own: --metric FILE.py:FUNCTION"]
    if report.verdict is Verdict.UNCHECKED:
        return ["give realistic data: --calib DIR in the command, data= in Python"]
    tips = []
    if alternatives := _measured_alternatives(report):
        name, figures = alternatives[0]
        others = [other for other, _ in alternatives[1:]]
        also = f"; {' and '.join(others)} {'were' if len(others) > 1 else 'was'} ok too" if others else ""
        tips.append(f"take {name}, which was measured ok ({figures}){also}")
    tips += [*_about_data(report), *_about_algorithms(report), *_about_formats(report)]
    return tips[:MOST_ADVICE]


def _measured_alternatives(report: Report) -> list[tuple[str, str]]:
    """Return the wider presets that protection measured to be ok, with the figures of the worst output.

    A trial reads "A16W8: 0.05 ok, output 'logits' (classes): SQNR 34.1 dB".
    """
    facts = report.protection
    trials = (alternative.partition(": ") for alternative in (facts.alternatives if facts else ()))
    return [(name, text.partition(", ")[2]) for name, _, text in trials]


def _about_data(report: Report) -> list[str]:
    facts = report.calibration
    if facts.is_random:
        what = "calibrate on" if facts.methods else "judge it on"
        return [f"{what} real data instead of random numbers: --calib DIR"]
    if not facts.methods:
        return []  # nothing was calibrated, so more data changes nothing
    tips = []
    if report.verdict is Verdict.COLLAPSED:
        tips.append(
            f"check that the calibration data is prepared as in training{': --preprocess' * bool(facts.preprocessing)}"
        )
    if facts.samples < FEW_SAMPLES:
        tips.append(f"calibrate on more than {facts.samples} samples: 100 to 500 are usual")
    return tips


def _about_algorithms(report: Report) -> list[str]:
    """Suggest algorithms that take seconds, were not requested, and have something to do."""
    if report.calibration.is_random:
        return []  # algorithms would fit the network to noise
    requested = {algorithm.name for algorithm in report.algorithms}
    op_types = set(report.op_types.values())
    # correcting biases made weights in blocks of four bits or less (MX4) worse
    is_coarse = any(
        isinstance(entry.choice, BlockChoice) and FORMATS[entry.choice.format].bits_per_element <= 4
        for entry in report.plan
        if entry.role is Role.WEIGHT
    )
    # equalizing channels helps tensors whose channels share a scale
    shared = {
        entry.role for entry in report.plan if isinstance(entry.choice, AffineChoice) and entry.choice.axis is None
    }
    useful = {
        "BiasCorrection=true": BIAS_CORRECTION not in requested and op_types & PRODUCTS and not is_coarse,
        "include_cle=true": CROSS_LAYER not in requested and op_types & CONVOLUTIONS and Role.WEIGHT in shared,
        "include_sq=true": SMOOTH not in requested and op_types & NORMALIZATIONS and Role.ACTIVATION in shared,
    }
    wanted = [name for name, is_useful in useful.items() if is_useful]
    return [f"recover accuracy without training: {' '.join(f'--set {option}' for option in wanted)}"] if wanted else []


def _about_formats(report: Report) -> list[str]:
    facts = report.protection
    tried = {attempt.partition(": ")[0] for attempt in (facts.tried if facts else ())}
    weights = [entry.choice for entry in report.plan if entry.role is Role.WEIGHT]
    activations = [entry.choice for entry in report.plan if entry.role is Role.ACTIVATION]
    if any(isinstance(choice, BlockChoice) for choice in weights + activations):
        # not if protection measured other formats or protects these layers
        return [] if tried else ["take a block format with more bits: MXINT8 and MX9 keep nearly everything"]
    if all(isinstance(choice, FloatChoice) for choice in weights + activations):
        return ["take BF16, whose range is that of float32, in place of FP16"]
    affine = [weight for weight in weights if isinstance(weight, AffineChoice)]
    tips = []
    if affine and all(choice.axis is None for choice in affine):
        tips.append("give each channel its own scale: --config INT8_CNN_DEFAULT, or --set per_channel=true")
    is_narrow = any(
        isinstance(activation, AffineChoice) and FORMATS[activation.format].bits_per_element <= 8
        for activation in activations
    )
    if is_narrow and "A16W8" not in tried:
        tips.append("take 16-bit activations: --config A16W8, or U16S8_AAWS")
    if any(attempt.endswith(("sensitive layer in float", "sensitive layers in float")) for attempt in tried):
        return [*tips, "let protection keep more layers in float: --set ProtectBudget=0.3, of multiply-accumulates"]
    return [*tips, "leave the most sensitive nodes in float ('quark report' finds them): --set nodes_to_exclude=[NAME]"]
