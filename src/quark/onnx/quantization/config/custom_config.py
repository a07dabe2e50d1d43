"""The presets under the import path that scripts use; the table is in `quark.onnx.quantization.presets`.

Every preset is also a constant, `XINT8_CONFIG` as a QuantizationConfig and `XINT8_QCONFIG` as a QConfig. Each access
makes a fresh one, so that a script can change what it got.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quark.onnx.quantization.config.algorithm import AdaQuantConfig, AdaRoundConfig
from quark.onnx.quantization.config.config import QConfig, QuantizationConfig, get_default_config
from quark.onnx.quantization.config.data_type import BFP16, MX6, MXInt8
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


def _weights_only() -> QuantizationConfig:
    config = get_default_config("XINT8_ADAROUND")
    config.extra_options["WeightsOnly"] = True
    return config


def _attributes(*names: str, of: Mapping[str, int | str]) -> dict[str, int | str]:
    return {name: of[name] for name in names}


_BLOCK = ("axis", "bit_width", "block_size", "rounding_mode")
_OTHERS: dict[str, Callable[[], Any]] = {
    "DEFAULT_BFP_PARAMS": lambda: _attributes("bfp_method", *_BLOCK, of=BFP16.attributes),
    "DEFAULT_MICROEXPONENTS_PARAMS": lambda: dict(MX6.attributes),
    "DEFAULT_MICROSCALING_PARAMS": lambda: _attributes(
        "element_dtype", "axis", "block_size", "rounding_mode", of=MXInt8.attributes
    ),
    "XINT8_WEIGHTSONLY_ADAROUND_CONFIG": _weights_only,
    "adaround_algo": AdaRoundConfig,
    "adaquant_algo": AdaQuantConfig,
}

__all__ = [
    "DEFAULT_ADAQUANT_PARAMS",
    "DEFAULT_ADAROUND_PARAMS",
    "DefaultConfigMapping",
    "get_default_config",
    "get_default_config_mapping",
]


def __getattr__(name: str) -> Any:
    if name in _OTHERS:
        return _OTHERS[name]()
    for ending, make in (("_QCONFIG", QConfig.get_default_config), ("_CONFIG", get_default_config)):
        if name.endswith(ending) and name.removesuffix(ending) in PRESETS:
            return make(name.removesuffix(ending))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; presets: quark presets")


def __dir__() -> list[str]:
    presets = [f"{name}{ending}" for name in PRESETS for ending in ("_CONFIG", "_QCONFIG")]
    return sorted({*globals(), *_OTHERS, *presets})
