"""Sessions of ONNX Runtime, quiet, with our operators, and without needless copies of the weights.

A model handed over as bytes is there four times while it loads: in our graph, in the protobuf message, in its bytes and
in the runtime. Large weights therefore go to a temporary file that the runtime maps; it is removed at once (where the
system does not allow that, with the session). ResNet-50 (102 MB) so peaks 200 MB lower than by bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir

from quark.errors import ModelError
from quark.formats.native import library_file

_LOG = logging.getLogger(__name__)
_FILE_FROM_BYTES = 8 << 20  # weights beyond this take the way through a file
_EXTERNAL_FROM_BYTES = 1024  # smaller tensors stay inside the message
_QUIET = 3  # errors only

ModelSource: TypeAlias = ir.Model | onnx.ModelProto | bytes | str | os.PathLike[str]


def open_session(
    model: ModelSource,
    *,
    extra_outputs: Iterable[str] = (),
    providers: Sequence[str] = ("CPUExecutionProvider",),
    threads: int | None = None,
    has_optimizations: bool = True,
    has_library: bool = True,
) -> Any:
    """An `onnxruntime.InferenceSession` of the model, whose outputs are its own and the tensors of `extra_outputs`.

    `threads` None leaves it to the runtime. Providers that this runtime does not have are left out with a warning; the
    CPU is always there. The model is not changed. ModelError where a tensor is not in the graph, or the runtime
    refuses the model.
    """
    options = _session_options(threads, has_optimizations, has_library)
    extra = list(extra_outputs)
    if extra:
        options.enable_mem_pattern = False  # planned reuse of memory that outputs cannot take part in: a fifth more
    if isinstance(model, (str, os.PathLike)) and not extra:
        return _create(os.fspath(model), options, providers, os.fspath(model))
    if isinstance(model, bytes) and not extra:
        return _create(model, options, providers, "the model")
    graph_model = _with_outputs(_as_ir(model), extra)
    name = f"model '{graph_model.graph.name}'" if graph_model.graph.name else "the model"
    if _weight_bytes(graph_model) > _FILE_FROM_BYTES:
        return _create_from_file(graph_model, options, providers, name)
    return _create(ir.to_proto(graph_model).SerializeToString(), options, providers, name)


def release_memory() -> None:
    """Hand what was freed back to the system: the C library would keep it, beside what the next step takes."""
    with contextlib.suppress(AttributeError, OSError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _session_options(threads: int | None, has_optimizations: bool, has_library: bool) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _QUIET
    if threads is not None:
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
    if not has_optimizations:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    library = library_file() if has_library else None
    if library is not None:
        options.register_custom_ops_library(str(library))
    return options


def _create(source: str | bytes, options: Any, providers: Sequence[str], name: str) -> Any:
    import onnxruntime

    available = onnxruntime.get_available_providers()
    usable = [each for each in providers if each in available]
    if missing := [each for each in providers if each not in available]:
        _LOG.warning("this ONNX Runtime has no %s; it has %s", ", ".join(missing), ", ".join(available))
    if "CPUExecutionProvider" not in usable:
        usable.append("CPUExecutionProvider")
    try:
        return onnxruntime.InferenceSession(source, options, providers=usable)
    except Exception as error:  # the runtime's own classes share no root below this one
        raise ModelError(f"{name}: ONNX Runtime refuses it. {error}") from error


def _create_from_file(model: ir.Model, options: Any, providers: Sequence[str], name: str) -> Any:
    """A failure to write the file is not one of the model: then the bytes have to do."""
    folder = tempfile.TemporaryDirectory(prefix="quark-", ignore_cleanup_errors=True)
    path = Path(folder.name) / "model.onnx"
    try:
        ir.save(model, path, external_data="weights", size_threshold_bytes=_EXTERNAL_FROM_BYTES)
    except OSError as error:
        folder.cleanup()
        _LOG.info("%s: no temporary file (%s), loading it from memory", name, error)
        return _create(ir.to_proto(model).SerializeToString(), options, providers, name)
    try:
        session = _create(str(path), options, providers, name)
    except BaseException:
        folder.cleanup()
        raise
    if os.name == "nt":  # mapped files cannot be removed there
        weakref.finalize(session, folder.cleanup)
    else:
        folder.cleanup()
    return session


def _as_ir(model: ModelSource) -> ir.Model:
    if isinstance(model, ir.Model):
        return model
    if isinstance(model, (str, os.PathLike)):
        return ir.load(model)
    if isinstance(model, bytes):
        return ir.from_proto(onnx.load_model_from_string(model))
    return ir.from_proto(model)


def _with_outputs(model: ir.Model, extra: list[str]) -> ir.Model:
    """The model, or a copy of its graph (the tensors are shared) with more outputs."""
    if not extra:
        return model
    copy = model.clone()
    values = {value.name: value for node in copy.graph for value in node.outputs}
    own = {value.name for value in copy.graph.outputs}
    for name in dict.fromkeys(extra):
        if name not in values:
            raise ModelError(f"tensor '{name}': no node of the graph computes it, so that it cannot be an output")
        if name not in own:
            copy.graph.outputs.append(values[name])
    return copy


def _weight_bytes(model: ir.Model) -> int:
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
