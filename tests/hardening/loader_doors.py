"""Everything that reads a file from somewhere, as a function of its path. A door may give a result or a QuarkError."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from broken_sources import MODELS, RANGES_KEY

from quark.errors import InvalidValueError
from quark.features.finetuning.checkpoint import Checkpoint
from quark.features.mixed_precision.plan import MixedPlan
from quark.files.foreign import read_json
from quark.inspect.diagnose.files import read_side
from quark.inspect.inspection import inspect_model, inspection_table
from quark.onnx import quantize
from quark.onnx.calibrate import read_ranges
from quark.onnx.data import input_infos
from quark.onnx.data.array_files import read_array_file
from quark.onnx.data.images import find_preprocessing
from quark.onnx.data.sources import read_arrays, split_arrays
from quark.onnx.lint import lint
from quark.onnx.load import load
from quark.onnx.load.reading import read_proto, read_whole
from quark.onnx.pack import pack_model, unpack_model
from quark.onnx.quantization.config.files import load_config
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.making import read_card
from quark.plan import QuantizationPlan
from quark.report.formats_table import read_weights
from quark.search.trial import Trial


@dataclass(frozen=True)
class Door:
    """`origins` are the names of what is broken for it; `share` is how often it is chosen, against the others."""

    name: str
    enter: Callable[[Path], object]
    origins: tuple[str, ...]
    suffix: str = ".onnx"
    share: float = 1.0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidValueError("the callers of this door read text") from error


def _inspect(path: Path) -> None:
    inspection = inspect_model(path, read_proto)
    inspection.to_json()
    inspection_table(inspection)


def _weights(path: Path) -> None:
    read_weights(path, read_whole)


def _side(path: Path) -> None:
    side = read_side(path)
    _ = side.is_quantized, side.config


def _quantize(path: Path) -> None:
    """What loads goes on to the runtime, which may refuse it: that, too, is to be told as an error of ours."""
    quantize(path, config="XINT8", use_random_data=True)


def _samples(path: Path) -> None:
    infos = input_infos(load(_PLAIN_MODEL).model)
    for _ in split_arrays(read_arrays(path), infos, 1):
        pass


def _layer(path: Path) -> None:
    checkpoint = Checkpoint(path.parent / "layers", ["facts"])
    path.replace(checkpoint.folder / "0003.npz")
    checkpoint.read(3, {"weight": 12, "bias": 4})


def _ranges(path: Path) -> None:
    path.replace(path.with_name(f"ranges-{RANGES_KEY[:32]}.json"))
    read_ranges(path.parent, RANGES_KEY, ["x", "y"])


def _named_input() -> bytes:
    from onnx_models import conv_bn_relu

    return bytes(conv_bn_relu().SerializeToString())


_PLAIN_MODEL = _named_input()

DOORS = (
    Door("load", lambda path: load(path), MODELS, share=4),
    Door("inspect", _inspect, MODELS, share=2),
    Door("lint", lambda path: lint(path), MODELS, share=2),
    Door("report", _side, MODELS, share=2),
    Door("pack", lambda path: pack_model(path, path.with_name("out.onnx")), ("blocks", "packed"), share=2),
    Door("unpack", lambda path: unpack_model(path, path.with_name("out.onnx")), ("packed",), share=3),
    Door("card of a model", read_card, ("quantized", "blocks", "packed")),
    Door("quantize", _quantize, MODELS, share=0.4),
    Door("weights", _weights, MODELS),
    Door("weights in an archive", _weights, ("layer",), ".npz"),
    Door("card", read_card, ("card",), ".json", 2),
    Door("plan", lambda path: QuantizationPlan.from_json(_text(path)), ("plan",), ".json", 2),
    Door("mixed plan", lambda path: MixedPlan.from_json(_text(path)), ("mixed plan",), ".json"),
    Door("trial", lambda path: Trial.from_dict(read_json(path, "trial")), ("trial",), ".json"),
    Door("config json", lambda path: settings_of(load_config(path)), ("config", "old config"), ".json", 3),
    Door("config yaml", lambda path: settings_of(load_config(path)), ("config", "old config"), ".yaml", 1),
    Door("preprocessing", lambda path: find_preprocessing(path), ("preprocessing",), ".yaml"),
    Door("ranges", _ranges, ("ranges",), ".json"),
    Door("layer", _layer, ("layer",), ".npz"),
    Door("samples", _samples, ("samples",), ".npz"),
    Door("archive", lambda path: read_array_file(path, "archive"), ("samples",), ".npz"),
)
