"""The network's outputs as the runtime deploys the file, with integer kernels, beside the float network's."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir as ir

from quark.fidelity import OutputFidelity, OutputsMeter, batch_size_of
from quark.onnx.data import Sample
from quark.onnx.data.store import SampleStore
from quark.onnx.diagnose.running import Array, Run, each_in_order


def compare_outputs(
    quantized: ir.Model, samples: Iterable[Sample], exact: SampleStore, left_out: Collection[str] = ()
) -> tuple[OutputFidelity, ...]:
    """Judge the outputs in the order of the float network, without those that are `left_out`."""
    run = Run(quantized, "the quantized model", has_integer_kernels=True)
    meter = OutputsMeter()

    def compute(index: int, sample: Sample) -> tuple[dict[str, Array], dict[str, Array], int]:
        expected = exact[index]
        actual = run(sample, list(expected))
        kept = [name for name in expected if name not in left_out]
        return (
            {name: expected[name] for name in kept},
            {name: actual[name].copy() for name in kept},
            batch_size_of(sample),
        )

    each_in_order(compute, samples, lambda outputs: meter.add(*outputs))
    return meter.result()
