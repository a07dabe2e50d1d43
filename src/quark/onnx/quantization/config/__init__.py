"""The configuration: what people write, as Python objects, YAML or JSON."""

from quark.onnx.quantization.config.config import Config, QConfig, QuantizationConfig
from quark.onnx.quantization.config.custom_config import (
    DefaultConfigMapping,
    get_default_config,
    get_default_config_mapping,
)

__all__ = [
    "Config",
    "DefaultConfigMapping",
    "QConfig",
    "QuantizationConfig",
    "get_default_config",
    "get_default_config_mapping",
]
