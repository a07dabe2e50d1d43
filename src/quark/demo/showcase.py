"""The demo network quantized with one preset after the other, and what each costs and keeps.

Ranges come from training digits only; accuracy and agreement are counted on the held-out digits, which neither training
nor calibration has seen. Nothing is written to disk.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quark.account import Report
from quark.demo.digits import Digits, load_digits
from quark.demo.network import load_network, network_path
from quark.fidelity import Verdict
from quark.formats.catalog import FORMATS
from quark.plan import BlockChoice, Choice, Role

if TYPE_CHECKING:
    import onnx

    from quark.report.console import Table

PRESETS = (
    *("XINT8", "A8W8", "INT8_CNN_DEFAULT", "A16W8", "BF16", "BFP16", "MXINT8", "MX9"),
    *("MXFP8E4M3", "MXFP6E2M3", "MX6", "MXFP4E2M1", "MX4"),
)
CALIBRATION_COUNT = 256
CALIBRATION_BATCH = 16
COLOURS = {"ok": "green", "degraded": "yellow", "collapsed": "red", "unchecked": "yellow"}
FLOAT = "float32"


@dataclass(frozen=True)
class Row:
    """One preset. Accuracy and agreement are fractions of the held-out digits; bits are those of a number on average,
    scales included, and None where nothing of that role was quantized."""

    preset: str
    weight_bits: float | None
    activation_bits: float | None
    bytes: int
    accuracy: float
    difference: float
    agreement: float
    verdict: Verdict
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict.value}


def showcase(presets: Iterable[str] = PRESETS) -> Iterator[Row]:
    """A row for the float network, then one for each preset as soon as it is done."""
    from quark.onnx import quantize

    training, held_out = load_digits()
    network = load_network()
    named = _named_digits(network, held_out)
    accuracy = float(np.mean(named == held_out.labels))
    yield Row(FLOAT, 32, 32, network_path().stat().st_size, accuracy, 0.0, 1.0, Verdict.OK, 0.0)
    for preset in presets:
        start = time.perf_counter()
        result = quantize(network, _calibration(training), config=_quiet(preset))
        seconds = time.perf_counter() - start
        yield _row(preset, result.model, result.report, (held_out, named), seconds)


def _row(
    preset: str,
    model: onnx.ModelProto,
    report: Report,
    expected: tuple[Digits, NDArray[np.int64]],
    seconds: float,
) -> Row:
    held_out, float_named = expected
    named = _named_digits(model, held_out)
    accuracy = float(np.mean(named == held_out.labels))
    return Row(
        preset=preset,
        weight_bits=_bits(report, Role.WEIGHT),
        activation_bits=_bits(report, Role.ACTIVATION),
        bytes=model.ByteSize(),
        accuracy=accuracy,
        difference=accuracy - float(np.mean(float_named == held_out.labels)),
        agreement=float(np.mean(named == float_named)),
        verdict=report.verdict,
        seconds=seconds,
    )


def _quiet(preset: str) -> Any:
    """The preset without a summary of its own: the table is one."""
    from quark.onnx.quantization.config import get_default_config

    config = get_default_config(preset)
    config.print_summary = False
    return config


def _calibration(training: Digits) -> list[dict[str, NDArray[np.float32]]]:
    chosen = training.images[np.linspace(0, len(training) - 1, CALIBRATION_COUNT).astype(int)]
    return [{"input": each} for each in np.split(chosen, CALIBRATION_COUNT // CALIBRATION_BATCH)]


def _named_digits(model: onnx.ModelProto, digits: Digits) -> NDArray[np.int64]:
    """The digit that the network sees in each image."""
    from quark.onnx.session import open_session

    (logits,) = open_session(model).run(None, {"input": digits.images})
    named: NDArray[np.int64] = np.argmax(logits, axis=1)
    return named


def _bits(report: Report, role: Role) -> float | None:
    """The bits of most tensors of that role."""
    found = [_bits_of(each.choice) for each in report.plan if each.role is role]
    return max(set(found), key=found.count) if found else None


def _bits_of(choice: Choice) -> float:
    return (choice.quantizer.format if isinstance(choice, BlockChoice) else FORMATS[choice.format]).bits_per_element


def showcase_table(rows: Iterable[Row]) -> Table:
    """The rows for reading; 80 columns are enough."""
    from quark.report.console import cell, plain_table

    caption = (
        f"A small MobileNet on 450 held-out digits, calibrated on {CALIBRATION_COUNT} training digits. bits: of a "
        "weight / an activation, scales included. same: the share of digits named as the float network names them. "
        "Files of block formats (MX, BFP) hold their rounded weights as float32."
    )
    # no lines: the longest names leave no room for them in 80 columns
    table = plain_table(caption=cell(caption), caption_justify="left")
    table.add_column("preset", no_wrap=True)
    for heading in ("bits", "KB", "right %", "diff", "same %", "s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in rows:
        bits = (row.weight_bits, row.activation_bits)
        cells = [
            "/".join("-" if each is None else f"{each:g}" for each in bits),
            f"{row.bytes / 1000:.0f}",
            f"{100 * row.accuracy:.2f}",
        ]
        if row.preset != FLOAT:
            cells += [f"{100 * row.difference:+.2f}", f"{100 * row.agreement:.1f}", f"{row.seconds:.1f}"]
            table.add_row(row.preset, *cells, cell(row.verdict.value, COLOURS[row.verdict.value]))
        else:
            table.add_row(row.preset, *cells)
    return table
