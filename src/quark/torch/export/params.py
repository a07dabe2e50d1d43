"""Quantized networks in files, by the functions that AMD Quark has for it.

fx_graph_mode    TYPE_quantized.pth, a program of torch.export that runs without quark
eager_mode       TYPE.json and TYPE.safetensors, the state that `quark.torch.export.safetensors_file` describes
"""

from __future__ import annotations

import io
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.errors import InvalidValueError, ModelError, UnsupportedTypeError
from quark.onnx.save import complete, writing
from quark.text import get_logger
from quark.torch.export.deployable import frozen
from quark.torch.export.safetensors_file import export_safetensors, load_state
from quark.torch.quantization.config.type import QuantizationMode
from quark.torch.train.networks import FrozenNetwork

_LOG = get_logger(__name__)


def save_params(
    model: nn.Module,
    model_type: str,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    export_dir: str | os.PathLike[str] = "",
    quant_mode: QuantizationMode = QuantizationMode.eager_mode,
    compressed: bool = False,
    reorder: bool = True,
) -> None:
    """Write a quantized network into the folder `export_dir`, by default that of temporary files.

    With `fx_graph_mode`, the network is exported for the example `args` and `kwargs`. With `eager_mode`, its state is
    written: as codes if it is `compressed`, else as the float numbers that they stand for. A network that still trains
    is frozen first, in a copy. `reorder` makes no difference: packed bits have one order here.
    """
    if not isinstance(model_type, str) or not model_type or Path(model_type).name != model_type:
        raise InvalidValueError(f"model_type {model_type!r}: expected a name for the files, without folders")
    _check_mode(quant_mode)
    network = frozen(model)
    folder = Path(export_dir or tempfile.gettempdir())
    if quant_mode is not QuantizationMode.fx_graph_mode:
        names = f"{model_type}.safetensors", f"{model_type}.json"
        written, _ = export_safetensors(network, folder, has_codes=compressed, names=names)
        _LOG.info("wrote the state of the network to '%s' and the JSON file beside it", written)
        return
    if args is None:
        raise InvalidValueError(
            "args is None, and a network of fx_graph_mode is exported for an example: pass its inputs as a tuple"
        )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    torch.export.save(torch.export.export(network, tuple(args), kwargs=kwargs), content)
    target = folder / f"{model_type}_quantized.pth"
    with complete(target) as unfinished:
        unfinished.write_bytes(content.getvalue())
    _LOG.info("wrote the network to '%s'", target)


def load_params(
    model: nn.Module | None = None,
    json_path: str | os.PathLike[str] = "",
    safetensors_path: str | os.PathLike[str] = "",
    pth_path: str | os.PathLike[str] = "",
    quant_mode: QuantizationMode = QuantizationMode.eager_mode,
    compressed: bool = False,
    reorder: bool = True,
) -> nn.Module:
    """Read what `save_params` wrote.

    With `fx_graph_mode`, `pth_path` is the file, and the module of the program is returned. torch reads it: load files
    that you trust only. With `eager_mode`, `model` is a network that was quantized by the same configuration, and a
    copy of it with the state of the two files is returned. The files say whether they are `compressed`.
    """
    _check_mode(quant_mode)
    if quant_mode is QuantizationMode.fx_graph_mode:
        return _load_program(Path(pth_path)) if os.fspath(pth_path) else _missing("pth_path", quant_mode)
    if not os.fspath(json_path) or not os.fspath(safetensors_path):
        return _missing("json_path and safetensors_path", quant_mode)
    network = None if model is None else frozen(model)
    if not isinstance(network, FrozenNetwork):
        raise UnsupportedTypeError(
            "model: expected a network that ModelQuantizer.quantize_model returned for the configuration of the file, "
            f"got {type(model).__name__}"
        )
    return load_state(network, Path(safetensors_path), Path(json_path))


def _check_mode(quant_mode: object) -> None:
    if not isinstance(quant_mode, QuantizationMode):
        raise InvalidValueError(
            f"quant_mode {quant_mode!r}: expected QuantizationMode.eager_mode or QuantizationMode.fx_graph_mode"
        )


def _missing(names: str, quant_mode: QuantizationMode) -> nn.Module:
    raise InvalidValueError(f"load_params with {quant_mode}: expected {names}")


def _load_program(path: Path) -> nn.Module:
    if not path.is_file():
        raise ModelError(f"'{path}': there is no such file; save_params writes it")
    try:
        return torch.export.load(io.BytesIO(path.read_bytes())).module()
    except (RuntimeError, ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
        raise ModelError(f"'{path}': not a program that save_params wrote: {error}") from error
