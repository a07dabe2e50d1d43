"""How close a quantized network's outputs are to the float network's, and the verdict on it.

measures    SQNR, cosine, relative error, agreement and divergence of two tensors, from sums over samples
parts       what the outputs are, and the parts that have a scale of their own
kinds       how each kind of part is measured, and from which figure on it is ok
detections  boxes as sets
outputs     all outputs of two networks, over all samples
verdict     the verdict on parts, outputs and networks
improvement whether a change to a network is kept, from a few samples

`quark.onnx.comparing` runs networks and compares their outputs with these.
"""

from quark.compare.outputs import (
    FidelityMeter,
    OutputsMeter,
    batch_size_of,
    have_same_form,
    numberless_remark,
    outputs_without_numbers,
)
from quark.compare.verdict import (
    COLLAPSED_COSINE,
    COLLAPSED_SQNR_DB,
    OK_COSINE,
    OK_SQNR_DB,
    ExecutionGap,
    OutputFidelity,
    PartFidelity,
    Verdict,
    agreement_text,
    execution_gap,
    largest_drop,
    overall_verdict,
    worst_output,
    worst_text,
)

__all__ = [
    "COLLAPSED_COSINE",
    "COLLAPSED_SQNR_DB",
    "OK_COSINE",
    "OK_SQNR_DB",
    "ExecutionGap",
    "FidelityMeter",
    "OutputFidelity",
    "OutputsMeter",
    "PartFidelity",
    "Verdict",
    "agreement_text",
    "batch_size_of",
    "execution_gap",
    "have_same_form",
    "largest_drop",
    "numberless_remark",
    "outputs_without_numbers",
    "overall_verdict",
    "worst_output",
    "worst_text",
]
