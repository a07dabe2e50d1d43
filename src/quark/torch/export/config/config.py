"""Options for writing a quantized model: as safetensors with JSON, and as ONNX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quark.errors import UnsupportedOptionError, UnsupportedTypeError, refuse_unknown_fields, unknown_name

WEIGHT_FORMATS = ("real_quantized", "fake_quantized")
PACK_METHODS = ("reorder", "order")


@refuse_unknown_fields
@dataclass(frozen=True)
class JsonExporterConfig:
    """The quantized state as safetensors, with a JSON file that describes it.

    `weight_format`: codes and scales (real_quantized), or the float numbers that they stand for (fake_quantized).
    `pack_method` is that of `export_safetensors`. Shared scales and those of a cache belong to the configuration that a
    model is quantized by, and are refused here.
    """

    weight_merge_groups: Sequence[Sequence[str]] | None = None
    kv_cache_group: Sequence[str] = field(default_factory=tuple)
    min_kv_scale: float = 0.0
    weight_format: str = "real_quantized"
    pack_method: str = "reorder"

    def __post_init__(self) -> None:
        if self.weight_format not in WEIGHT_FORMATS:
            raise unknown_name("weight_format", self.weight_format, WEIGHT_FORMATS)
        if self.pack_method not in PACK_METHODS:
            raise unknown_name("pack_method", self.pack_method, PACK_METHODS)
        if self.weight_merge_groups:
            raise UnsupportedOptionError("weight_merge_groups: every weight keeps a scale of its own; leave it out")
        if self.kv_cache_group or self.min_kv_scale:
            raise UnsupportedOptionError(
                "kv_cache_group, min_kv_scale: these are fields of the Config of the quantizer"
            )


@refuse_unknown_fields
@dataclass(frozen=True)
class OnnxExporterConfig:
    """A QDQ file; it has no settings."""


@refuse_unknown_fields
@dataclass(frozen=True)
class ExporterConfig:
    """Settings of ModelExporter; None: the defaults."""

    json_export_config: JsonExporterConfig | None = None
    onnx_export_config: OnnxExporterConfig | None = None

    def __post_init__(self) -> None:
        for name, kind in (("json_export_config", JsonExporterConfig), ("onnx_export_config", OnnxExporterConfig)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise UnsupportedTypeError(f"{name} {value!r}: expected {kind.__name__}() or None")
