"""Sessions of ONNX Runtime, quiet, with our operators, and without needless copies of the weights.

A model handed over as bytes is there four times while it loads: in our graph, in the protobuf message, in its bytes and
in the runtime. Large weights therefore go to a temporary file that the runtime maps; it is removed at once (where the
system does not allow that, with the session). ResNet-50 (102 MB) so peaks 200 MB lower than by bytes. Weights that are
still as the user's file has them need no copy: the runtime maps that file.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from quark.errors import ModelError
from quark.files.output import Scratch
from quark.formats.native import library_file
from quark.onnx.input_files import check_unchanged, held_still
from quark.onnx.large_tensors import MappedTensor, mapped_files, weight_bytes
from quark.onnx.message import refer, split
from quark.onnx.without_library import ModelSource, with_functions
from quark.text import get_logger

_LOG = get_logger(__name__)
_FILE_FROM_BYTES = 8 << 20  # weights beyond this take the way through a file
_EXTERNAL_FROM_BYTES = 1024  # smaller tensors stay inside the message
_QUIET = 4  # nothing: an error is an exception as well, whose message says the same
_FOLDER_OF_WEIGHTS = "session.model_external_initializers_file_folder_path"


def open_session(
    model: ModelSource,
    *,
    extra_outputs: Iterable[str] = (),
    providers: Sequence[str] = ("CPUExecutionProvider",),
    threads: int | None = None,
    has_optimizations: bool = True,
    has_library: bool = True,
    has_integer_kernels: bool = True,
) -> Any:
    """An `onnxruntime.InferenceSession` of the model, whose outputs are its own and the tensors of `extra_outputs`.

    `threads` None leaves it to the runtime. Providers that this runtime does not have are left out with a warning; the
    CPU is always there. Without `has_integer_kernels` quantizers are computed as they stand: otherwise the runtime also
    quantizes float weights by itself, where what they are multiplied with is. The model is not changed. ModelError
    where a tensor is not in the graph, or the runtime refuses the model.
    """
    extra = list(extra_outputs)
    make_options = functools.partial(
        _session_options, threads, has_optimizations, has_library, bool(extra), has_integer_kernels
    )
    options = make_options()
    if has_library and library_file() is None:
        model = with_functions(model)
    if isinstance(model, (str, os.PathLike)) and not extra:
        return _create(os.fspath(model), options, providers, os.fspath(model))
    if isinstance(model, bytes) and not extra:
        return _create(model, options, providers, "the model")
    graph_model = _with_outputs(_as_ir(model), extra)
    name = f"model '{graph_model.graph.name}'" if graph_model.graph.name else "the model"
    if weight_bytes(graph_model) > _FILE_FROM_BYTES:
        session = _create_in_place(graph_model, make_options(), providers, name)
        return session or _create_from_file(graph_model, options, providers, name)
    return _create(ir.to_proto(graph_model).SerializeToString(), options, providers, name)


@contextlib.contextmanager
def running(what: str) -> Iterator[None]:
    """What the runtime raises in here, as a ModelError that says what was run: its own classes share no root."""
    try:
        yield
    except Exception as error:
        raise ModelError(f"ONNX Runtime cannot run {what}: {' '.join(str(error).split())}") from error


def check_computed(model: ir.Model, tensors: Iterable[str]) -> None:
    """That nodes of the graph compute these tensors; a ModelError names the first that none does."""
    computed = {value.name for node in model.graph for value in node.outputs}
    for name in tensors:
        if name not in computed:
            raise ModelError(f"tensor '{name}': no node of the graph computes it, so that it cannot be an output")


def release_memory() -> None:
    """Hand what was freed back to the system: the C library would keep it, beside what the next step takes."""
    with contextlib.suppress(AttributeError, OSError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _session_options(
    threads: int | None,
    has_optimizations: bool,
    has_library: bool,
    has_extra_outputs: bool,
    has_integer_kernels: bool,
) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _QUIET
    if threads is not None:
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
    if has_extra_outputs:
        options.enable_mem_pattern = False  # planned reuse of memory that outputs cannot take part in: a fifth more
    if not has_integer_kernels:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
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
        raise ModelError(f"{name}: ONNX Runtime refuses it. {error}{_remedy(error)}") from error


def _remedy(error: Exception) -> str:
    """What to do about a file of types that the CPU has no kernels for: ONNX's own small ones, float64, bfloat16."""
    if "Could not find an implementation for" not in str(error):
        return ""
    if "implementation for DequantizeLinear" not in str(error):
        return (
            ". This ONNX Runtime has no such operator for the types of the model; most often layers of float64 or "
            "bfloat16, which 'quark quantize' converts: to run the model itself, export it in float32"
        )
    return (
        ". Its weights are of a type that this ONNX Runtime does not compute with, as those of files that were packed "
        "with the profile native: give the model that 'quark unpack' makes of it, or pack with the profile portable"
    )


def _create_in_place(model: ir.Model, options: Any, providers: Sequence[str], name: str) -> Any:
    """A session whose large weights are those of the file that the model came from. None where some were computed since
    and are not small, or the runtime does not find the file: one that is older, or forbids what lies behind links."""
    tensors = [value.const_value for value in model.graph.initializers.values()]
    usable = [each for each in tensors if isinstance(each, MappedTensor) and _is_in_place(each)]
    if not usable or weight_bytes(model) - sum(each.nbytes for each in usable) > _FILE_FROM_BYTES:
        return None
    folder = Path(os.path.commonpath([each.file.path.parent for each in usable]))
    message = split(model, _is_in_place)
    for proto, tensor in message.apart():
        assert isinstance(tensor, MappedTensor)
        location = tensor.file.path.relative_to(folder).as_posix()
        refer(proto, location, tensor.offset, tensor.nbytes)
    options.add_session_config_entry(_FOLDER_OF_WEIGHTS, str(folder))
    files = mapped_files(model)
    release_memory()  # pieces of weights that were read
    try:
        with held_still(files):  # the runtime opens them by their names
            return _create(message.proto.SerializeToString(), options, providers, name)
    except ModelError as error:
        check_unchanged(files)  # the runtime's own error does not tell
        _LOG.debug("%s: weights are not used in place: %s", name, error)
        return None


def _is_in_place(tensor: ir.TensorProtocol) -> bool:
    """That the bytes of a weight can be used where they lie: in a file with a name, aligned as numbers should be."""
    if not isinstance(tensor, MappedTensor) or not tensor.file.path.is_absolute():
        return False
    return tensor.nbytes >= _EXTERNAL_FROM_BYTES and tensor.offset % max(1, int(tensor.dtype.itemsize)) == 0


def _create_from_file(model: ir.Model, options: Any, providers: Sequence[str], name: str) -> Any:
    """A failure to write the file is not one of the model: then the bytes have to do."""
    with contextlib.ExitStack() as stack:
        try:
            folder = Scratch()
            stack.callback(folder.remove)
            path = folder.path / "model.onnx"
            ir.save(model, path, external_data="weights", size_threshold_bytes=_EXTERNAL_FROM_BYTES)
        except OSError as error:
            stack.close()
            _LOG.info("%s: no temporary file (%s), loading it from memory", name, error)
            return _create(ir.to_proto(model).SerializeToString(), options, providers, name)
        session = _create(str(path), options, providers, name)
        if os.name == "nt":  # mapped files cannot be removed there
            stack.pop_all()
            weakref.finalize(session, folder.remove)
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
    check_computed(model, extra)
    copy = model.clone()
    values = {value.name: value for node in copy.graph for value in node.outputs}
    own = {value.name for value in copy.graph.outputs}
    for name in dict.fromkeys(extra):
        if name not in own:
            copy.graph.outputs.append(values[name])
    return copy
