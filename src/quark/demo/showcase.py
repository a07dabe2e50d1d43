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
from quark.files.output import scratch_folder
from quark.formats.catalog import FORMATS
from quark.onnx import get_default_config, quantize
from quark.onnx.quantization.presets import PRESETS as PRESET_TABLE
from quark.onnx.session import open_session
from quark.plan import BlockChoice, Role
from quark.report.console import Table, cell, plain_table
from quark.text import silent

if TYPE_CHECKING:
    import onnx

    from quark.onnx import QuantizedModel

PRESETS = (
    *("XINT8", "A8W8", "INT8_CNN_DEFAULT", "A16W8", "BF16", "BFP16", "MXINT8", "MX9"),
    *("MXFP8E4M3", "MXFP6E2M3", "MX6", "MXFP4E2M1", "MX4"),
)
GOOD_FOR = {
    "XINT8": "AMD's NPU; slower than float on a CPU",
    "A8W8": "8-bit integers with any scale, for NPUs that take those",
    "INT8_CNN_DEFAULT": "CPUs: small, and faster than float",
    "A16W8": "networks whose activations need more than 8 bits",
    "BF16": "hardware with bfloat16; half the size, nearly exact",
    "BFP16": "NPUs with block float; nearly exact",
    "MXINT8": "hardware with microscaling; nearly exact",
    "MX9": "hardware with shared microexponents; nearly exact",
    "MXFP8E4M3": "hardware with 8-bit floats",
    "MXFP6E2M3": "small files that stay accurate, packed",
    "MX6": "smaller files, packed; check the accuracy",
    "MXFP4E2M1": "the smallest files, packed; large networks only, or after finetuning",
    "MX4": "the smallest files, packed; rarely accurate enough",
}
CALIBRATION_COUNT = 256
CALIBRATION_BATCH = 16
COLOURS = {"ok": "green", "degraded": "yellow", "collapsed": "red", "unchecked": "yellow"}
FLOAT = "float32"


@dataclass(frozen=True)
class Row:
    """One preset. Accuracy and agreement are fractions of the held-out digits. `bytes` is the size of the file as the
    runtime reads it, `packed_bytes` with packed weights.

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
    packed_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict.value}


def showcase(presets: Iterable[str] = PRESETS) -> Iterator[Row]:
    """Yield a row for the float network, then one for each preset when it is done."""

    training, held_out = load_digits()
    network = load_network()
    float_named = _named_digits(network, held_out)
    float_accuracy = float(np.mean(float_named == held_out.labels))
    size = network_path().stat().st_size
    yield Row(FLOAT, 32, 32, size, float_accuracy, 0.0, 1.0, Verdict.OK, 0.0, size)
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
            packed_bytes=_packed_bytes(result),
        )


def _calibration(training: Digits) -> list[dict[str, NDArray[np.float32]]]:
    chosen = training.images[np.linspace(0, len(training) - 1, CALIBRATION_COUNT).astype(int)]
    return [{"input": batch} for batch in np.split(chosen, CALIBRATION_COUNT // CALIBRATION_BATCH)]


def _named_digits(model: onnx.ModelProto, digits: Digits) -> NDArray[np.int64]:
    """Return the predicted digit for each image."""

    (logits,) = open_session(model).run(None, {"input": digits.images})
    named: NDArray[np.int64] = np.argmax(logits, axis=1)
    return named


def _packed_bytes(result: QuantizedModel) -> int:
    with scratch_folder() as folder, silent():  # integers are packed already, which the log would say
        return result.save(folder / "packed.onnx", pack=True).stat().st_size


def _bits(report: Report, role: Role) -> float | None:
    """Return the bits of most tensors of a role."""
    choices = [entry.choice for entry in report.plan if entry.role is role]
    formats = [
        choice.quantizer.format if isinstance(choice, BlockChoice) else FORMATS[choice.format] for choice in choices
    ]
    bits = [fmt.bits_per_element for fmt in formats]
    return max(set(bits), key=bits.count) if bits else None


def showcase_table(rows: Iterable[Row]) -> Table:
    """Return the rows as a table of at most 80 columns."""
    caption = (
        f"A small MobileNet on 450 held-out digits, calibrated on {CALIBRATION_COUNT} training digits. bits: of a "
        "weight / an activation, scales included. packed: the size of the file with weights in their true width "
        "(--pack), of which nodes and names take much in a network this small. same: the share of digits with the "
        "prediction of the float network."
    )
    # without lines, to fit the longest names into 80 columns
    numbers = ("bits", "KB", "packed", "right %", "same %", "s")
    table = plain_table(("preset",), numbers, is_rigid=True, caption=cell(caption), caption_justify="left")
    table.add_column("verdict", no_wrap=True)
    for row in rows:
        bits = (row.weight_bits, row.activation_bits)
        cells = [
            "/".join("-" if count is None else f"{count:g}" for count in bits),
            f"{row.bytes / 1000:.0f}",
            f"{row.packed_bytes / 1000:.0f}",
            f"{100 * row.accuracy:.2f}",
        ]
        if row.preset != FLOAT:
            cells += [f"{100 * row.agreement:.1f}", f"{row.seconds:.1f}"]
            table.add_row(row.preset, *cells, cell(row.verdict.value, COLOURS[row.verdict.value]))
        else:
            table.add_row(row.preset, *cells)
    return table


def uses_table(presets: Iterable[str]) -> Table:
    """Return what each preset is good for."""
    table = plain_table(("preset", "good for"))
    for name in presets:
        table.add_row(name, GOOD_FOR.get(name) or PRESET_TABLE[name].description)
    return table
