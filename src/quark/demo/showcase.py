"""`quark demo`: the demo network quantized with many presets.

Calibration uses training digits only; accuracy and agreement are measured on the held-out digits, which neither
training nor calibration has seen. Nothing is written to disk.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quark.account import Report
from quark.compare import Verdict
from quark.demo.digits import Digits, load_digits
from quark.demo.network import load_network, network_path
from quark.formats.catalog import FORMATS
from quark.onnx import get_default_config, quantize
from quark.onnx.session import open_session
from quark.plan import BlockChoice, Role
from quark.report.console import Table, cell, plain_table

if TYPE_CHECKING:
    import onnx

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
    """One preset. Accuracy and agreement are fractions of the held-out digits.

    Bits are the average of a number, including scales, and None if nothing of that role was quantized.
    """

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
    """Yield a row for the float network, then one for each preset when it is done."""

    training, held_out = load_digits()
    network = load_network()
    float_named = _named_digits(network, held_out)
    float_accuracy = float(np.mean(float_named == held_out.labels))
    yield Row(FLOAT, 32, 32, network_path().stat().st_size, float_accuracy, 0.0, 1.0, Verdict.OK, 0.0)
    for preset in presets:
        config = get_default_config(preset)
        config.print_summary = False
        start = time.perf_counter()
        result = quantize(network, _calibration(training), config=config)
        seconds = time.perf_counter() - start
        named = _named_digits(result.model, held_out)
        accuracy = float(np.mean(named == held_out.labels))
        yield Row(
            preset=preset,
            weight_bits=_bits(result.report, Role.WEIGHT),
            activation_bits=_bits(result.report, Role.ACTIVATION),
            bytes=result.model.ByteSize(),
            accuracy=accuracy,
            difference=accuracy - float_accuracy,
            agreement=float(np.mean(named == float_named)),
            verdict=result.report.verdict,
            seconds=seconds,
        )


def _calibration(training: Digits) -> list[dict[str, NDArray[np.float32]]]:
    chosen = training.images[np.linspace(0, len(training) - 1, CALIBRATION_COUNT).astype(int)]
    return [{"input": each} for each in np.split(chosen, CALIBRATION_COUNT // CALIBRATION_BATCH)]


def _named_digits(model: onnx.ModelProto, digits: Digits) -> NDArray[np.int64]:
    """Return the predicted digit for each image."""

    (logits,) = open_session(model).run(None, {"input": digits.images})
    named: NDArray[np.int64] = np.argmax(logits, axis=1)
    return named


def _bits(report: Report, role: Role) -> float | None:
    """Return the bits of most tensors of a role."""
    choices = [each.choice for each in report.plan if each.role is role]
    formats = [each.quantizer.format if isinstance(each, BlockChoice) else FORMATS[each.format] for each in choices]
    bits = [each.bits_per_element for each in formats]
    return max(set(bits), key=bits.count) if bits else None


def showcase_table(rows: Iterable[Row]) -> Table:
    """Return the rows as a table of at most 80 columns."""
    caption = (
        f"A small MobileNet on 450 held-out digits, calibrated on {CALIBRATION_COUNT} training digits. bits: of a "
        "weight / an activation, scales included. same: the share of digits with the prediction of the float network. "
        "Files of block formats (MX, BFP) hold their rounded weights as float32."
    )
    # without lines, to fit the longest names into 80 columns
    numbers = ("bits", "KB", "right %", "diff", "same %", "s")
    table = plain_table(("preset",), numbers, is_rigid=True, caption=cell(caption), caption_justify="left")
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
