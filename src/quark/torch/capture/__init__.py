"""Capture an exported program, its module or a plain module as a `Network`."""

from quark.torch.capture.batches import Batch, Batches, inputs_of_batch
from quark.torch.capture.capture import capture, input_names
from quark.torch.capture.program import export_for_training, why_not_run

__all__ = ["Batch", "Batches", "capture", "export_for_training", "input_names", "inputs_of_batch", "why_not_run"]
