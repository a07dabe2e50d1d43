"""Metadata about how a model was made: versions of the packages involved, and hashes that identify its settings."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping

import quark
from quark.onnx.settings import Settings
from quark.plan import QuantizationPlan


def versions() -> dict[str, str]:
    """The versions that can matter to the result."""
    result = {"quark": quark.__version__}
    for name in ("numpy", "onnx", "onnx-ir"):
        result[name] = importlib.metadata.version(name)
    import onnxruntime

    return {**result, "onnxruntime": onnxruntime.__version__}


def metadata_of(settings: Settings, plan: QuantizationPlan) -> Mapping[str, str]:
    """The metadata of the file about how it was made."""
    config = json.dumps(settings.config, sort_keys=True)
    return {
        "quark.version": quark.__version__,
        "quark.config_name": settings.name,
        "quark.config": config,
        "quark.config_sha256": hashlib.sha256(config.encode()).hexdigest(),
        "quark.plan_sha256": plan.digest,
    }
