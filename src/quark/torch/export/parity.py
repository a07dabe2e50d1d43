"""Whether an exported file computes what the network does.

ONNX Runtime and torch add in different orders, and its integer kernels add integers, so that here and there a value
falls on the other side of a rounding. In a deep network that grows: behind many layers the two may differ by as much as
rounding itself does, and both be right. So the check has two parts:

    outputs     the file, as anyone would run it, against the network. Beyond `EQUAL_SQNR_DB` nothing else is asked
    layers      else every layer by itself, from the very numbers that the network has there (`layer_parity`). A layer
                below `LAYER_SQNR_DB` computes something else: an error names the first one

Where all layers agree and the outputs do not, the runtime's integer kernels could still be wrong: they are judged by
how much better the same file does without them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx
from torch.utils import _pytree as pytree

from quark.fidelity import FidelityMeter
from quark.onnx.session import open_session
from quark.torch.export.errors import ParityError
from quark.torch.export.layer_parity import Divergence, first_divergence
from quark.torch.export.samples import Inputs

Array = NDArray[Any]

EQUAL_SQNR_DB = 60.0
SUSPICIOUS_SQNR_DB = 10.0  # of outputs, once every layer is known to agree by itself
KERNEL_GAP_DB = 10.0


@dataclass(frozen=True)
class ParityReport:
    """The file against the network, over `samples`: of all outputs the largest difference, the worst SQNR, and the
    least share of samples with the same largest class, where an output has classes."""

    samples: int
    max_abs_diff: float
    sqnr_db: float
    agreement: float | None = None
    first_divergence: Divergence | None = None

    def __str__(self) -> str:
        classes = "" if self.agreement is None else f", same class for {self.agreement:.1%}"
        figures = f"SQNR {self.sqnr_db:.1f} dB, largest difference {self.max_abs_diff:.2g}"
        return f"{figures}{classes} over {self.samples} samples"

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it; infinities as text."""
        plain = {**vars(self), "first_divergence": self.first_divergence and vars(self.first_divergence)}
        return {key: str(x) if isinstance(x, float) and not math.isfinite(x) else x for key, x in plain.items()}


def check_parity(
    network: fx.GraphModule,
    path: Path,
    batches: Sequence[Inputs],
    values: Mapping[str, str],
) -> ParityReport:
    """Compare the file with the network; `values` has the name in the file for names of nodes. A ParityError names the
    first layer that differs."""
    report = compare_outputs(network, path, batches)
    if report.sqnr_db >= EQUAL_SQNR_DB:
        return report
    found = first_divergence(network, path, batches[0], values)
    if found is not None:
        raise _differs(path, replace(report, first_divergence=found))
    if report.sqnr_db < SUSPICIOUS_SQNR_DB:
        plain = compare_outputs(network, path, batches, has_optimizations=False)
        if plain.sqnr_db > report.sqnr_db + KERNEL_GAP_DB:
            raise ParityError(
                f"'{path.name}' in ONNX Runtime differs from the network ({report}), and less so without the runtime's "
                f"integer kernels ({plain}): on this processor they are not exact for these numbers. Use int8 for "
                "activations and weights both, or fewer bits for weights; check=False leaves this check out",
                report,
            )
    return report


def compare_outputs(
    network: fx.GraphModule,
    path: Path,
    batches: Sequence[Inputs],
    *,
    has_optimizations: bool = True,
) -> ParityReport:
    """The outputs of the file in ONNX Runtime against those of the network."""
    session = open_session(path, has_optimizations=has_optimizations)
    names = [each.name for each in session.get_inputs()]
    meters = [FidelityMeter(each.name) for each in session.get_outputs()]
    for batch in batches:
        feeds = {name: numpy_of(x) for name, x in zip(names, batch, strict=True)}
        for meter, expected, actual in zip(meters, outputs_of(network, batch), session.run(None, feeds), strict=True):
            meter.add(expected.reshape(np.shape(actual)), np.asarray(actual))
    results = [meter.result() for meter in meters]
    agreements = [each.agreement for each in results if each.agreement is not None]
    return ParityReport(
        samples=sum(len(batch[0]) if batch and batch[0].dim() else 1 for batch in batches),
        max_abs_diff=max(each.max_error for each in results),
        sqnr_db=min(each.sqnr_db for each in results),
        agreement=min(agreements) if agreements else None,
    )


def outputs_of(network: fx.GraphModule, inputs: Inputs) -> list[Array]:
    """What the network gives, flat and as arrays."""
    with torch.no_grad():
        result = network(*inputs)
    return [numpy_of(each) for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]


def numpy_of(x: torch.Tensor) -> Array:
    return np.ascontiguousarray(x.detach().cpu().numpy())


def _differs(path: Path, report: ParityReport) -> ParityError:
    found = report.first_divergence
    assert found is not None
    return ParityError(
        f"'{path.name}' computes something else than the network ({report}). The first layer that differs, from the "
        f"same inputs, is {found}. Leave that layer out of quantization (exclude), or export with check=False and "
        "judge by the figures of a data set",
        report,
    )
