"""How much memory there is for a verdict, and whether a model is too large for one.

The verdict runs the float model, then the quantized one. ONNX Runtime maps the weights and rearranges them for its
kernels, so that a session takes about what the weights do. Where samples are needed for more than the verdict, the
float model runs anyway, and the verdict asks for no more memory. Otherwise nothing would ever hold the model, and there
is a limit to what is held for the verdict alone.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from quark.onnx.data import Samples
from quark.onnx.large_tensors import weight_bytes
from quark.onnx.quantization.settings import Settings
from quark.report.quantities import size_text

USUAL_LIMIT_BYTES = 1_000_000_000

_MEMORY_INFO = Path("/proc/meminfo")
_GROUP_LIMIT, _GROUP_USE = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.stat")


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


def free_memory() -> int | None:
    """Bytes that this process can still have, as far as the system tells."""
    found = [each for each in (_free_of_machine(), _free_of_group()) if each is not None]
    return min(found, default=None)


def _remark(needed: int, limit: str) -> str:
    return (
        f"the verdict was skipped: running the float and the quantized model takes about {size_text(needed)} for each, "
        f"and {limit}. Set VerdictMemoryLimit, in MB, to have it, or run 'quark compare' on the two files"
    )


def _free_of_machine() -> int | None:
    try:
        return _number(_MEMORY_INFO, "MemAvailable:") * 1024
    except (OSError, ValueError):
        return None


def _free_of_group() -> int | None:
    """What a container may still take; what it has of files can make way."""
    try:
        return int(_GROUP_LIMIT.read_text(encoding="ascii")) - _number(_GROUP_USE, "anon")
    except (OSError, ValueError):
        return None  # there is no group, or its limit is "max"


def _number(path: Path, name: str) -> int:
    """What the line of that name says."""
    lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    found = next((words[1] for words in lines if len(words) > 1 and words[0] == name), None)
    if found is None:
        raise ValueError(name)
    return int(found)
