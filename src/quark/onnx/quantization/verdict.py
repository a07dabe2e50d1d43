"""How the quantized model does on samples that it was not calibrated on, against the float model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from quark.fidelity import FidelityMeter, OutputFidelity, outputs_without_numbers
from quark.onnx.calibrate import FloatRunner
from quark.onnx.data import Samples
from quark.onnx.message import Message
from quark.onnx.quantization.settings import Settings
from quark.onnx.session import open_session, release_memory, running

Sample = Mapping[str, Any]


def float_outputs(model: ir.Model, samples: Samples, settings: Settings) -> list[dict[str, Any]]:
    """The outputs of the model as it is now, for the held-out samples."""
    with FloatRunner(model, providers=settings.calibrate.providers) as runner:
        return [runner.outputs(sample) for sample in samples.held_out]


def compare_outputs(
    message: Message, samples: Sequence[Sample], expected: Sequence[Sample], providers: Sequence[str]
) -> tuple[OutputFidelity, ...]:
    """Every float output, over all samples; integer outputs are left out, and those without numbers to compare with."""
    if not samples:
        return ()
    left_out = outputs_without_numbers(expected)
    session = open_session(message.to_graph(), providers=tuple(providers))
    meters: dict[str, FidelityMeter] = {}
    for sample, reference in zip(samples, expected, strict=True):
        with running("the quantized model"):
            results = session.run(list(reference), dict(sample))
        actual = dict(zip(reference, results, strict=True))
        for name, value in reference.items():
            if value.dtype.kind == "f" and name not in left_out:
                meters.setdefault(name, FidelityMeter(name)).add(value, actual[name])
    del session
    release_memory()
    return tuple(meter.result() for meter in meters.values())
