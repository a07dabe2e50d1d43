"""The ranges that a placement wants, from one or more passes over the samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quark.onnx.calibrate import FloatRunner, Wanted, calibrate
from quark.onnx.choose import RangeKey
from quark.onnx.data import Samples
from quark.onnx.quantization.settings import Settings
from quark.ranges import TensorRange


def measure(
    runner: FloatRunner,
    wanted: Sequence[RangeKey],
    samples: Samples,
    settings: Settings,
    known: Mapping[RangeKey, TensorRange] | None = None,
) -> dict[RangeKey, TensorRange]:
    """Those that are known already, and the others measured. A tensor that is wanted for several specs is looked at
    once for each."""
    ranges = dict(known or {})
    pending = [key for key in wanted if key not in ranges]
    while pending:
        once = dict(reversed(pending))
        methods = {name: Wanted(spec.method, spec.integer, spec.is_symmetric) for name, spec in once.items()}
        found = calibrate(runner, methods, samples, settings.calibrate)
        ranges |= {(name, once[name]): each for name, each in found.items()}
        pending = [key for key in pending if key not in ranges]
    return ranges
