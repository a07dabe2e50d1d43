"""The network's outputs as the runtime deploys the file, with integer kernels, beside the float network's."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir as ir

from quark.fidelity import FidelityMeter, OutputFidelity
from quark.onnx.data import Sample
from quark.onnx.data.store import SampleStore
from quark.onnx.diagnose.running import Array, Run, each_in_order


def compare_outputs(
    quantized: ir.Model, samples: Iterable[Sample], exact: SampleStore, left_out: Collection[str] = ()
) -> tuple[OutputFidelity, ...]:
    """Outputs that hold floats, in the order of the float network; those whose shape differs are left out too."""
    run = Run(quantized, "the quantized model", has_integer_kernels=True)
    meters: dict[str, FidelityMeter] = {}

    def one(index: int, sample: Sample) -> list[tuple[str, Array, Array]]:
        wanted = exact[index]
        found = run(sample, list(wanted))
        return [(name, wanted[name], found[name].copy()) for name in wanted]

    def see(found: list[tuple[str, Array, Array]]) -> None:
        for name, expected, actual in found:
            if expected.dtype.kind == "f" and expected.shape == actual.shape and name not in left_out:
                meters.setdefault(name, FidelityMeter(name)).add(expected, actual)

    each_in_order(one, samples, see)
    return tuple(each.result() for each in meters.values())
