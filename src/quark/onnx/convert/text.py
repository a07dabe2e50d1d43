"""Models as text: protobuf's text format, one file a person can read and compare."""

from __future__ import annotations

import os

import onnx
from google.protobuf import text_format

from quark.errors import ModelError
from quark.files.foreign import read_text
from quark.onnx.file_graph import read_message
from quark.text import one_line

MOST_TEXT_BYTES = 1 << 30
MOST_REASON = 200  # characters: protobuf's message quotes the text


def model_text(model: onnx.ModelProto) -> str:
    """The model as text, with its weights."""
    return str(text_format.MessageToString(model))


def model_of_text(path: str | os.PathLike[str]) -> onnx.ModelProto:
    """The model that a text file holds, checked as a model file is. Raises ModelError if the file is not one."""
    label = f"'{os.fspath(path)}'"
    text = read_text(path, label, MOST_TEXT_BYTES, ModelError)
    if not text.strip():
        raise ModelError(f"{label} is empty. Expected an ONNX model as text")
    try:
        model = text_format.Parse(text, onnx.ModelProto())
    except RecursionError as error:
        raise ModelError(f"{label} is not the text of an ONNX model: its parts are nested too deeply") from error
    except text_format.ParseError as error:
        raise ModelError(
            f"{label} is not the text of an ONNX model ({one_line(error)[:MOST_REASON]}); "
            "`python -m quark.onnx.tools.convert_onnx_to_onnxtxt` writes such files"
        ) from error
    try:
        return read_message(model)[0].filled()
    except ModelError as error:
        raise ModelError(f"{label}: {error}") from error
