"""The machine and the packages that figures come from, in a line each. No name of a host, no path."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from quark.formats.native import instruction_set

# what tables call a distribution; those that are not installed are left out
DISTRIBUTIONS = {
    "quark-quantizer": "quark",
    "onnxruntime": "ONNX Runtime",
    "onnxruntime-gpu": "ONNX Runtime (GPU)",
    "onnx": "onnx",
    "numpy": "numpy",
    "torch": "torch",
}


def describe_machine() -> str:
    """Processor, how many of them, and the instructions that our native code uses."""
    return f"{_processor()}, {os.cpu_count()} processors, {instruction_set()}"


def versions() -> dict[str, str]:
    """Of Python and of what is installed."""
    installed = {distribution.metadata["Name"]: distribution.version for distribution in metadata.distributions()}
    # a benchmark of the torch side runs without ONNX Runtime
    found = {name: installed[each] for each, name in DISTRIBUTIONS.items() if each in installed}
    return {"Python": platform.python_version(), **found}


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    if facts.is_file():
        for line in facts.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
