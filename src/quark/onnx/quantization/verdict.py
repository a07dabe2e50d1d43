"""Compare the quantized model with the float model on samples that it was not calibrated on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from quark.fidelity import OutputFidelity, OutputsMeter, batch_size_of, outputs_without_numbers
from quark.onnx.calibrate import FloatRunner
from quark.onnx.data import Samples
from quark.onnx.message import Message
from quark.onnx.quantization.settings import Settings
from quark.onnx.session import open_session, release_memory, running

Sample = Mapping[str, Any]


def float_outputs(model: ir.Model, samples: Samples, settings: Settings) -> list[dict[str, Any]]:
    """Run the model as it is now on the held-out samples."""
    with FloatRunner(model, providers=settings.calibrate.providers) as runner:
        return [runner.outputs(sample) for sample in samples.held_out]


def compare_outputs(
    message: Message, samples: Sequence[Sample], expected: Sequence[Sample], providers: Sequence[str]
) -> tuple[OutputFidelity, ...]:
    """Judge every output over all samples; outputs without numbers to compare with are left out."""
    if not samples:
        return ()
    left_out = outputs_without_numbers(expected)
    session = open_session(message.to_graph(), providers=tuple(providers))
    meter = OutputsMeter()
    for sample, reference in zip(samples, expected, strict=True):
        with running("the quantized model"):
            results = session.run(list(reference), dict(sample))
        wanted = {name: value for name, value in reference.items() if name not in left_out}
        meter.add(wanted, dict(zip(reference, results, strict=True)), batch_size_of(sample))
    del session
    release_memory()
    return meter.result()
