"""Fit the weights of one layer. The layer keeps its old weights where the new ones are no better.

Most layers are fitted on the processor by compiled code (compiled_fit.py). torch is then not even imported, which takes
a second. It fits the others (torch_fit.py): on a GPU, behind activations other than bounds, with inputs of both
networks mixed, with rounded outputs, and where there is no compiled code.
"""

from __future__ import annotations

import importlib.metadata
import os

from quark.features.finetuning.compiled_fit import fit_compiled, is_compiled
from quark.features.finetuning.options import FitOptions
from quark.features.finetuning.problem import Fitted, Problem
from quark.formats.native import instruction_set
from quark.onnx.calibrate.runner import processor_count


def fit(problem: Problem, options: FitOptions) -> Fitted:
    """Find the weights that come closest to the targets; None if those that are there are better."""
    if not len(problem.training) or not len(problem.held_out):
        return Fitted(None, None, 0.0, 0.0, 0, 0.0, "has too few rows")
    if is_compiled(problem, options):
        return fit_compiled(problem, options)
    from quark.features.finetuning.torch_fit import fit_by_torch

    return fit_by_torch(problem, options)


def arithmetic() -> str:
    """Facts that the bytes of a result depend on apart from the problem. torch need not be imported, and may not be
    installed if compiled code fits all layers."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    threads = os.environ.get("OMP_NUM_THREADS", processor_count())
    return f"torch {torch}, {threads} threads, {instruction_set()} instructions"
