"""Commands on one model file: inspect, lint, pack, unpack, reproduce."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.options import DATA_PATHS, PATH, json_option
from quark.cli.terminal import say, say_json
from quark.files.output import scratch_folder
from quark.inspect.inspection import inspect_model, inspection_table
from quark.inspect.lint import Level, Where, is_bfloat16, other_purpose, places
from quark.inspect.lint import lint as find
from quark.onnx.file_graph import read_graph
from quark.onnx.load.reading import read_proto
from quark.onnx.pack import pack_model, unpack_model
from quark.onnx.quantization.making import read_card
from quark.onnx.quantization.reproduction import find_data, find_source
from quark.onnx.quantization.reproduction import reproduce as rebuild
from quark.report.console import Console, Table, cell, plain_table
from quark.report.quantities import count_of, listed, size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quark.inspect.lint import Finding, Place
    from quark.onnx.pack import LeftWeight, PackedWeight, PackFacts

HAS_FINDINGS = 3  # exit status of lint
DIFFERENT = 3  # exit status of reproduce
ROWS_PER_RULE = 5  # a file for another target breaks the same rule hundreds of times
PROFILES = ("portable", "custom", "native")
LINT_ADVICE = (
    "For the NPU, quantize the float model with --target npu. If the file is for something else, there is "
    "nothing to do; --all lists what the NPU would refuse."
)
NPU_SESSION = (
    "session on the NPU (option names of AMD's Ryzen AI documents; not run here):",
    "    onnxruntime.InferenceSession(PATH, providers=['VitisAIExecutionProvider'], provider_options=[",
    "        {'xclbin': XCLBIN, 'cache_dir': FOLDER, 'cache_key': NAME}])",
)
BF16_SESSION = (*NPU_SESSION[:2], NPU_SESSION[2].replace("'xclbin': XCLBIN", "'config_file': JSON"))
MOST_LEFT = 5  # the most weights that the table lists for a reason


@click.command()
@click.argument("model", type=PATH)
@json_option()
def inspect(model: Path, as_json: bool) -> None:
    """Show the operators, parameters and formats of MODEL.

    The formats are those of the quantized tensors.
    """

    inspection = inspect_model(model, read_proto)
    if as_json:
        say_json(inspection.to_json())
    else:
        Console().print(inspection_table(inspection))


@click.command()
@click.argument("model", type=PATH)
@json_option("Print all findings as JSON instead of a table.")
@click.option("--strict", is_flag=True, help="Treat warnings as errors.")
@click.option("--all", "has_all", is_flag=True, help="List all findings of a file that was not made for the NPU.")
@click.option("--nodes", "has_nodes", is_flag=True, help="List every node and where it would run.")
def lint(model: Path, as_json: bool, strict: bool, has_all: bool, has_nodes: bool) -> None:
    """Check a quantized MODEL against the rules of AMD's NPU.

    The rules are those of power-of-two int8, which XINT8 makes, or of bfloat16 (BF16 with BF16QDQToCast). Also says how
    many nodes the NPU would compute, and how to open a session on it.

    \b
    Exit status: 0 no errors; there may be warnings, unless --strict
                 1 the file is not a model
                 2 invalid command line
                 3 errors were found
    """

    findings = find(model)
    counts = {level.value: sum(finding.level is level for finding in findings) for level in Level}
    if as_json:
        nodes = [asdict(place) for place in places(model, findings)]
        say_json({"findings": [asdict(finding) for finding in findings], "summary": counts, "nodes": nodes})
    elif findings and not has_all and (purpose := other_purpose(model)):
        say(f"{model.name} was not made for AMD's NPU: {purpose}. {LINT_ADVICE}")
    else:
        console = Console()
        if findings:
            console.print(_findings_table(findings))
        levels = [f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items() if count]
        console.print(", ".join(levels) or "no findings: the NPU accepts this model")
        node_places = places(model, findings)
        if has_nodes:
            console.print(_places_table(node_places))
        is_quantized = not any(finding.rule == "Quantized" for finding in findings)
        if is_quantized:
            console.say(f"nodes by these rules: {_summed_places(node_places)}")
        for line in BF16_SESSION if is_bfloat16(read_graph(model)) else NPU_SESSION:
            console.say(line)
    if counts["error"] or (strict and findings):
        raise SystemExit(HAS_FINDINGS)


def _summed_places(node_places: Sequence[Place]) -> str:
    words = {Where.NPU: "on the NPU", Where.UNKNOWN: "on either, by the compiler's release", Where.CPU: "on the CPU"}
    parts = []
    for where, word in words.items():
        kinds = Counter(place.op_type for place in node_places if place.where is where)
        if kinds or where is Where.NPU:
            names = listed(f"{count} {kind}" for kind, count in kinds.most_common())
            parts.append(f"{kinds.total()} {word}" + ("" if where is Where.NPU else f" ({names})"))
    return ", ".join(parts)


def _places_table(node_places: Sequence[Place]) -> Table:
    table = plain_table(("node", "operator", "where", "why"), ())
    for place in node_places:
        table.add_row(cell(place.node), cell(place.op_type), place.where.value, cell(place.reason))
    return table


def _findings_table(findings: Sequence[Finding]) -> Table:
    """One row for all places with the same message, errors first."""
    table = Table.grid(padding=(0, 2))
    rules = list(dict.fromkeys(finding.rule for finding in findings))
    alike: dict[tuple[str, int, str, str], list[Finding]] = {}
    for finding in findings:
        alike.setdefault((finding.level.value, rules.index(finding.rule), finding.message, finding.fix), []).append(
            finding
        )
    seen: Counter[int] = Counter()
    totals = Counter(rule for _, rule, _, _ in alike)
    for (level, rule, message, fix), alike_findings in sorted(alike.items(), key=lambda item: item[0][:2]):
        seen[rule] += 1
        name = cell(rules[rule], "bold")
        if seen[rule] <= ROWS_PER_RULE:
            where = " ".join(dict.fromkeys(name for name in (alike_findings[0].node, alike_findings[0].tensor) if name))
            more = f" and {len(alike_findings) - 1} more" if len(alike_findings) > 1 else ""
            detail = cell(f"{where}{more}{': ' if where else ''}{message}").append("\n").append_text(cell(fix))
            detail.overflow = "fold"
            table.add_row(cell(level, "bold red" if level == "error" else "yellow"), name, detail)
        elif seen[rule] == totals[rule]:
            table.add_row("", name, f"and {totals[rule] - ROWS_PER_RULE} other messages; --json has all")
    return table


@click.command()
@click.argument("model", type=PATH)
@click.argument("output", type=PATH)
@click.option(
    "--profile",
    type=click.Choice(PROFILES),
    default="portable",
    show_default=True,
    help="portable: standard operators, runs anywhere. custom: the same, as calls of a function in the file. native: "
    "ONNX's own small types, for runtimes that support them.",
)
@json_option("Print all facts as JSON instead of tables.")
def pack(model: Path, output: Path, profile: str, as_json: bool) -> None:
    """Store quantized weights at their true bit width.

    Reads the quantized MODEL and writes OUTPUT. The network's outputs stay bit-identical, and it runs as fast: ONNX
    Runtime unpacks the weights when the session is created. 'quark unpack' restores the model.
    """

    facts = pack_model(model, output, profile)
    if as_json:
        say_json(facts.to_json())
        return
    console = Console()
    sizes = f"{size_text(facts.bytes_before)} -> {size_text(facts.bytes_after)}"
    console.print(cell(f"{output}  {sizes}, {facts.bits_per_weight:.2f} bits per packed weight"))
    console.print(_packed_table(facts))
    if facts.left:
        console.print(_left_table(facts))
    for remark in facts.remarks:
        console.print(cell(remark))


def _packed_table(facts: PackFacts) -> Table:
    table = plain_table(("packed as",), ("weights", "bits", "before", "after"))
    groups: dict[tuple[str, str], list[PackedWeight]] = defaultdict(list)
    for weight in facts.packed:
        groups[weight.format, weight.note].append(weight)
    for (name, note), weights in groups.items():
        before, after = sum(weight.bytes_before for weight in weights), sum(weight.bytes_after for weight in weights)
        count = sum(weight.bytes_after * 8 / weight.bits for weight in weights)
        cells = [str(len(weights)), f"{after * 8 / count:.2f}", size_text(before), size_text(after)]
        table.add_row(cell(f"{name} ({note})" if note else name), *cells)
    return table


def _left_table(facts: PackFacts) -> Table:
    table = plain_table(("not packed",), ("weights", "size"))
    groups: dict[str, list[LeftWeight]] = defaultdict(list)
    for weight in facts.left:
        groups[weight.reason].append(weight)
    for reason, weights in groups.items():
        names = listed((weight.name for weight in weights), MOST_LEFT)
        size = size_text(sum(weight.bytes for weight in weights))
        table.add_row(cell(f"{reason}: {names}"), str(len(weights)), size)
    return table


@click.command()
@click.argument("model", type=PATH)
@click.argument("output", type=PATH)
@json_option("Print all facts as JSON.")
def unpack(model: Path, output: Path, as_json: bool) -> None:
    """Restore the model that a packed file was made from.

    Reads the packed MODEL and writes OUTPUT, with every weight as float, byte for byte as it was.
    """

    facts = unpack_model(model, output)
    if as_json:
        say_json(facts.to_json())
    else:
        sizes = f"{size_text(facts.bytes_before)} -> {size_text(facts.bytes_after)}"
        say(f"{output}  {sizes}, {count_of(len(facts.weights), 'weight')} unpacked")


@click.command()
@click.argument("card", type=PATH)
@click.option(
    "--float",
    "--model",
    "model",
    type=PATH,
    metavar="FLOAT",
    help="The float model, or the weights that quantize-torch read (default: at the path in the card, or next to it).",
)
@click.option(
    "--calib",
    type=PATH,
    metavar=DATA_PATHS,
    help="The calibration data (default: at the path in the card, or next to the card).",
)
@click.option(
    "--module",
    metavar="FILE.py:FUNCTION",
    help="For exports of torch modules: a function that returns the float module, or (module, loader). It is run.",
)
@click.option(
    "--state",
    type=PATH,
    metavar="FILE.pt|FILE.safetensors",
    help="For exports of torch modules that were trained: the state_dict of the quantized module.",
)
@click.option("--output", type=PATH, metavar="OUT", help="Write the file here (default: only compare it).")
@json_option("Print JSON instead of lines.")
def reproduce(
    card: Path,
    model: Path | None,
    calib: Path | None,
    module: str | None,
    state: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Rebuild a quantized file from its card and compare.

    CARD is MODEL.json, or the quantized MODEL.onnx itself.

    \b
    Exit status: 0 the bytes are the same
                 1 an error: the float model or the data is not the
                   card's, or the file cannot be made from a card
                 2 invalid command line
                 3 the bytes differ; the differences are listed
    """

    stored = read_card(card)
    if stored.card.torch is None:
        if module is not None or state is not None:
            raise click.UsageError("--module and --state are for exports of torch modules: leave them out")
        result = rebuild(card, model, calib, output)
    elif stored.card.torch.request:
        if module is not None or state is not None:
            raise click.UsageError("quark quantize-torch made this file: leave --module and --state out")
        from quark.cli.quantize_torch_command import request_of
        from quark.vision.quantizing import reproduce_classifier

        weights, images = find_source(stored, model), find_data(stored, calib).source
        with scratch_folder() as folder:
            result = reproduce_classifier(stored, request_of(stored.card, weights, Path(images), folder), output)
    else:
        from quark.torch.export.reproduction import reproduce_export

        if model is not None:
            raise click.UsageError("this file was made from a torch module, so give --module instead of --float")
        result = reproduce_export(card, module, calib, state, output)
    if as_json:
        say_json(result.to_dict(), indent=1)
    else:
        for warning in result.warnings:
            say(f"changed: {warning}")
        if result.is_same:
            say(f"same bytes: {result.found.bytes:,} with SHA-256 {result.expected}")
        else:
            say(f"different: SHA-256 {result.found.sha256}, expected {result.expected}")
            for difference in result.differences:
                say(f"  {difference}")
        if output is not None:
            say(f"written: {output}, {output.with_suffix('.json')}")
    if not result.is_same:
        raise SystemExit(DIFFERENT)
