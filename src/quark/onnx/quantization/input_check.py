"""Checks of arguments, at the import path that existing scripts use."""

from __future__ import annotations

from typing import Any

from quark.onnx.quantization.config.preference import preferred_options

__all__ = ["check_quantization_preference_arguments"]


def check_quantization_preference_arguments(
    calibrate_method: Any, include_fast_ft: bool, extra_options: dict[str, Any]
) -> None:
    """Set, in place, the extra options that the option QuantizationPreference among them asks for."""
    extra_options.update(preferred_options(calibrate_method, include_fast_ft, extra_options))
