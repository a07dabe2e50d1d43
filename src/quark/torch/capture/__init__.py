"""Capture an exported program, its module or a plain module as a `Network`."""

from quark.torch.capture.batches import Batch, Batches, read_batch
from quark.torch.capture.capture import capture
from quark.torch.capture.program import DynamicShapes, export_for_training, why_not_run
from quark.torch.capture.signature import CallSignature, signature_of

__all__ = [
    "Batch",
    "Batches",
    "CallSignature",
    "DynamicShapes",
    "capture",
    "export_for_training",
    "read_batch",
    "signature_of",
    "why_not_run",
]
