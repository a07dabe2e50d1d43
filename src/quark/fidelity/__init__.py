"""How close a quantized network's outputs are to the float network's, and the verdict on it.

pair        two tensors as a whole: cosine, SQNR, agreement
parts       what the outputs are, and the parts that have a scale of their own
kinds       how each kind of part is measured, and from which figure on it is ok
detections  boxes as sets
outputs     all outputs of two networks, over all samples
verdict     the verdict on parts, outputs and networks
"""

from quark.fidelity.outputs import OutputsMeter, batch_size_of, have_same_form
from quark.fidelity.pair import FidelityMeter, numberless_remark, outputs_without_numbers
from quark.fidelity.verdict import (
    COLLAPSED_COSINE,
    COLLAPSED_SQNR_DB,
    OK_COSINE,
    OK_SQNR_DB,
    OutputFidelity,
    PartFidelity,
    Verdict,
    overall_verdict,
    worst_output,
    worst_text,
)

__all__ = [
    "COLLAPSED_COSINE",
    "COLLAPSED_SQNR_DB",
    "OK_COSINE",
    "OK_SQNR_DB",
    "FidelityMeter",
    "OutputFidelity",
    "OutputsMeter",
    "PartFidelity",
    "Verdict",
    "batch_size_of",
    "have_same_form",
    "numberless_remark",
    "outputs_without_numbers",
    "overall_verdict",
    "worst_output",
    "worst_text",
]
