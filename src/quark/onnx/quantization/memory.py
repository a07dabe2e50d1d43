"""How much memory there is for a verdict, and whether a model is too large for one.

The verdict runs the float model, then the quantized one. ONNX Runtime maps the weights and rearranges them for its
kernels, so that a session takes about what the weights do. Where samples are needed for more than the verdict, the
float model runs anyway, and the verdict asks for no more memory. Otherwise nothing would ever hold the model, and there
is a limit to what is held for the verdict alone.
"""

from __future__ import annotations

import onnx_ir as ir

from quark.onnx.data import Samples
from quark.onnx.large_tensors import free_memory, weight_bytes
from quark.onnx.settings import Settings
from quark.report.quantities import size_text

USUAL_LIMIT_BYTES = 1_000_000_000


def verdict_obstacle(model: ir.Model, samples: Samples, settings: Settings) -> str | None:
    """Why there is no verdict on this model, in words; None where there is one."""
    given = settings.calibrate.verdict_limit_bytes
    needed = weight_bytes(model)
    if given is not None:
        return _remark(needed, f"VerdictMemoryLimit allows {size_text(given)}") if needed > given else None
    is_run_anyway = settings.needs_data or (settings.sample_use != 0 and not samples.is_random)
    if needed > USUAL_LIMIT_BYTES and not is_run_anyway:
        return _remark(needed, f"the limit is {size_text(USUAL_LIMIT_BYTES)}")
    free = free_memory()
    is_short = free is not None and 2 * needed > free
    return _remark(needed, "that is more than half of the memory that is free") if is_short else None


def _remark(needed: int, limit: str) -> str:
    return (
        f"the verdict was skipped: running the float and the quantized model takes about {size_text(needed)} for each, "
        f"and {limit}. Set VerdictMemoryLimit, in MB, to have it, or run 'quark compare' on the two files"
    )
