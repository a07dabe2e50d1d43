"""The presets under the import path that scripts use; the table is in `quark.onnx.quantization.presets`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from quark.onnx.quantization.config.config import QuantizationConfig, get_default_config
from quark.onnx.quantization.presets import DEFAULT_ADAQUANT_PARAMS, DEFAULT_ADAROUND_PARAMS, PRESETS


class _FreshConfigs(Mapping[str, QuantizationConfig]):
    """All presets by name; every lookup makes a fresh config."""

    def __getitem__(self, name: str) -> QuantizationConfig:
        return get_default_config(name)

    def __contains__(self, name: object) -> bool:
        return name in PRESETS

    def __iter__(self) -> Iterator[str]:
        return iter(PRESETS)

    def __len__(self) -> int:
        return len(PRESETS)


DefaultConfigMapping: Mapping[str, QuantizationConfig] = _FreshConfigs()


def get_default_config_mapping() -> Mapping[str, QuantizationConfig]:
    """All presets by name."""
    return DefaultConfigMapping


__all__ = [
    "DEFAULT_ADAQUANT_PARAMS",
    "DEFAULT_ADAROUND_PARAMS",
    "DefaultConfigMapping",
    "get_default_config",
    "get_default_config_mapping",
]
