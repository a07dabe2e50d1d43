"""Sessions of ONNX Runtime, quiet, with our operators, and without needless copies of the weights.

A model given as bytes is in memory four times while it loads: in our graph, in the protobuf message, in its bytes and
in the runtime. Large weights therefore go to a temporary file that the runtime maps; it is removed at once (if the
system does not allow that, with the session). This lowers the peak for ResNet-50 (102 MB) by 200 MB. Weights that are
still as in the user's file need no copy: the runtime maps that file. Beyond 1 GB, it does not arrange them for its
kernels either, which would put all of them into memory; pages of a mapped file can be dropped. A session of 3 GB takes
0.7 GB then, and 3.0 GB otherwise.

If no library was compiled, our operators become functions. Files that quark writes have these functions already; other
files, and the parts of a graph that a step runs, do not. With the library they need none, and run faster. On a GPU the
library is used only if it has kernels for it: operators that run on the CPU would send every tensor there and back.

Where a session runs is said by `providers`: names of devices or of ONNX Runtime's providers (quark.devices).

ONNX Runtime takes a time quadratic in the layers to optimize a quantized network: each of its passes does, most of all
NhwcTransformer, which looks at all readers of the zero points that ConstantSharing merged. With 2000 int8 convolutions
that is 10 to 12 s, where the float network takes 0.3 s. Large quantized graphs are therefore opened without the passes
that do nothing for quantizers (`PASSES_LEFT_OUT`), in a third of the time; those that make integer kernels stay.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir

from quark.devices import Providers, providers_of
from quark.errors import InvalidValueError, ModelError
from quark.files.output import Scratch, is_same_file
from quark.formats.native import cuda_problem, library_file
from quark.onnx.input_files import check_unchanged, held_still
from quark.onnx.large_tensors import MappedTensor, Message, mapped_files, refer, split, weight_bytes
from quark.ops.function_body import CAST_LIKE_OPSET
from quark.ops.portable_functions import add_portable_functions, define_portable_functions
from quark.ops.schema import DOMAIN
from quark.text import get_logger, one_line

_LOG = get_logger(__name__)
_FILE_FROM_BYTES = 8 << 20  # more weights than this go through a file
# bytes of float weights in place; arranged for products, they would be in memory twice
_UNPACKED_FROM_BYTES = 1_000_000_000
_EXTERNAL_FROM_BYTES = 1024  # smaller tensors stay inside the message
_QUIET = 4  # no messages: an error is also an exception with the same text
_FOLDER_OF_WEIGHTS = "session.model_external_initializers_file_folder_path"
_IR_VERSION_OF_FUNCTIONS = 9

LARGE_GRAPH_DEQUANTIZERS = 3000  # beyond this, opening takes seconds: 600 convolutions with int8 weights and biases
# Layouts, sharing of equal constants and nodes, and fusions of float operators. They change how float operators round,
# and no result of an integer kernel. Versions of ONNX Runtime that lack one of them ignore its name.
PASSES_LEFT_OUT = (
    *("ConstantSharing", "CommonSubexpressionElimination", "NhwcTransformer", "NchwcTransformer"),
    *("TransposeOptimizer", "TransposeOptimizer_CPUExecutionProvider", "FreeDimensionOverrideTransformer"),
    *("AttentionFusion", "GroupQueryAttentionFusion", "GroupQueryAttentionPreNormFusion", "EmbedLayerNormFusion"),
    *("LayerNormFusion", "LayerNormFusionL1", "LayerNormFusionL2", "SimplifiedLayerNormFusion", "SkipLayerNormFusion"),
    *("GeluFusion", "GeluFusionL1", "GeluFusionL2", "FastGeluFusion", "QuickGeluFusion"),
    *("BiasGeluFusion", "BiasDropoutFusion", "BiasSkipLayerNormFusion", "BiasSoftmaxFusion"),
    *("ConvActivationFusion", "ConvAddActivationFusion", "GemmActivationFusion", "MatMulActivationFusion"),
    *("MatMulAddFusion", "MatMulScaleFusion", "MatmulTransposeFusion"),
    *("ReshapeFusion", "GatherToSliceFusion", "GatherSliceToSplitFusion", "SliceConcatToSpaceToDepthFusion"),
)

_CUSTOM: list[Path] = []  # the libraries of all runs that are under way

ModelSource: TypeAlias = ir.Model | onnx.ModelProto | bytes | str | os.PathLike[str]


@contextlib.contextmanager
def custom_libraries(paths: Iterable[Path]) -> Iterator[None]:
    """Register these libraries of operators in every session that is created inside the block, by any thread."""
    given = [path.resolve() for path in paths]
    _CUSTOM.extend(given)
    try:
        yield
    finally:
        for path in given:
            _CUSTOM.remove(path)


def _register_custom(options: Any, own: Path | None) -> None:
    """Register the user's libraries. Scripts may list our own as well, which is registered already."""
    for path in dict.fromkeys(_CUSTOM):
        if own is not None and is_same_file(path, own):
            continue
        try:
            options.register_custom_ops_library(str(path))
        except Exception as error:  # the runtime's own classes have no other common root
            raise InvalidValueError(
                f"library '{path}' (UserCustomOpLibPath): ONNX Runtime cannot register it: {one_line(error)}"
            ) from error


def open_session(
    model: ModelSource | Message,
    *,
    extra_outputs: Iterable[str] = (),
    providers: Sequence[str] = ("CPUExecutionProvider",),
    threads: int | None = None,
    has_optimizations: bool = True,
    has_library: bool = True,
    has_integer_kernels: bool = True,
) -> Any:
    """Return an `onnxruntime.InferenceSession` of the model with its own outputs and the tensors of `extra_outputs`.

    `threads` None lets the runtime decide. `providers` are devices, which must work, and providers, which are skipped
    with a warning if this runtime does not have them; the CPU is always there. Without `has_integer_kernels` quantizers
    are computed as they are; otherwise the runtime also quantizes float weights that are multiplied by quantized
    values. Large quantized graphs lack some optimizations (`is_slow_to_optimize`). The model is not changed. Raises
    ModelError if a tensor is not in the graph, or the runtime refuses the model; InvalidValueError or
    MissingDependencyError if a device cannot be used.
    """
    extra = list(extra_outputs)
    where = providers_of(providers)
    has_kernels = where.kind == "cpu" or (where.kind == "cuda" and not cuda_problem())
    library = library_file() if has_library and has_kernels else None
    # ONNX Runtime 1.23 refuses a graph in which this rewrite removes a Clip on a graph input.
    left_out = (*_passes_left_out(model), *(() if has_integer_kernels else ("ClipQuantRewrite",)))

    def make_options() -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = _QUIET
        if threads is not None:
            options.intra_op_num_threads = threads
            options.inter_op_num_threads = 1
        # threads that spin take processors from our own and from other programs, which matters most under load
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if extra:
            options.enable_mem_pattern = False  # its planned reuse of memory excludes outputs: a fifth more memory
        if not has_integer_kernels:
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        options.add_session_config_entry("optimization.disable_specified_optimizers", ";".join(left_out))
        if not has_optimizations:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        if library is not None:
            options.register_custom_ops_library(str(library))
        _register_custom(options, library)
        return options

    options = make_options()
    needs_functions = has_library and library is None
    if isinstance(model, Message):
        model = _runnable(model, is_graph=bool(extra) or needs_functions)
    if needs_functions:
        model = with_functions(model)
    if isinstance(model, (str, os.PathLike)) and not extra:
        return _create(os.fspath(model), options, where, os.fspath(model))
    if isinstance(model, bytes) and not extra:
        return _create(model, options, where, "the model")
    graph_model = _with_outputs(model, extra)
    name = f"model '{graph_model.graph.name}'" if graph_model.graph.name else "the model"
    if weight_bytes(graph_model) > _FILE_FROM_BYTES:
        session = _create_in_place(graph_model, make_options(), where, name)
        return session or _create_from_file(graph_model, options, where, name)
    return _create(ir.to_proto(graph_model).SerializeToString(), options, where, name)


def is_slow_to_optimize(model: ModelSource | Message | mmap.mmap) -> bool:
    """True if a graph has so many quantized tensors that its sessions do without some optimizations."""
    if isinstance(model, (str, os.PathLike)):
        try:
            with Path(model).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return is_slow_to_optimize(content)
        except (OSError, ValueError):  # the runtime says what is wrong with it; ValueError: it is empty
            return False
    if isinstance(model, (bytes, mmap.mmap)):
        with memoryview(model) as view:
            types: Iterable[str] = _types_in_file(view)
    elif isinstance(model, ir.Model):
        types = (node.op_type for node in model.graph)
    else:
        types = (node.op_type for node in (model.proto if isinstance(model, Message) else model).graph.node)
    return sum(op_type == "DequantizeLinear" for op_type in types) >= LARGE_GRAPH_DEQUANTIZERS


def _types_in_file(view: memoryview) -> list[str]:
    """The operators of a serialized model; none where it has too few to matter, or is damaged. Weights are skipped."""
    from quark.onnx.load.wire import GRAPH, BrokenError, fields  # late: loading opens sessions

    node, op_type = onnx.GraphProto.NODE_FIELD_NUMBER, onnx.NodeProto.OP_TYPE_FIELD_NUMBER
    try:
        graphs = [field for field in fields(view, 0, len(view)) if field.is_part(GRAPH)]
        nodes = [field for graph in graphs for field in fields(view, graph.content, graph.end) if field.is_part(node)]
        if len(nodes) < LARGE_GRAPH_DEQUANTIZERS:
            return []
        parts = (part for entry in nodes for part in fields(view, entry.content, entry.end) if part.is_part(op_type))
        return [str(view[part.content : part.end], "utf-8", "replace") for part in parts]
    except BrokenError:
        return []


def _passes_left_out(model: ModelSource | Message) -> tuple[str, ...]:
    return PASSES_LEFT_OUT if is_slow_to_optimize(model) else ()


@contextlib.contextmanager
def running(what: str) -> Iterator[None]:
    """Turn exceptions of the runtime into a ModelError that says what was run. Its own classes have no common root."""
    try:
        yield
    except Exception as error:
        raise ModelError(f"ONNX Runtime cannot run {what}: {' '.join(str(error).split())}") from error


def ort_values(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a sample as values of the runtime."""
    import onnxruntime

    return {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in sample.items()}


def run_shared(session: Any, names: Sequence[str], sample: Mapping[str, Any]) -> list[Any]:
    """The outputs of these names as values of the runtime, which arrays can share memory with; as arrays if the sample
    holds strings, which no such value can be made of."""
    if any(array.dtype == object for array in sample.values()):
        return list(session.run(list(names), dict(sample)))
    return list(session.run_with_ort_values(list(names), ort_values(sample)))


def check_computed(model: ir.Model, tensors: Iterable[str]) -> None:
    """Raise ModelError, naming the tensor, if no node of the graph computes one of these."""
    computed = {value.name for node in model.graph for value in node.outputs}
    for name in tensors:
        if name not in computed:
            raise ModelError(f"tensor '{name}': no node of the graph computes it, so that it cannot be an output")


def release_memory() -> None:
    """Return freed memory to the system. The C library would keep it, in addition to what the next step allocates."""
    with contextlib.suppress(AttributeError, OSError):  # only glibc has this function
        ctypes.CDLL(None).malloc_trim(0)


def _create(source: str | bytes, options: Any, where: Providers, name: str) -> Any:
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(
            source, options, providers=list(where.names), provider_options=list(where.options)
        )
    except Exception as error:  # the runtime's own classes have no other common root
        raise ModelError(f"{name}: ONNX Runtime refuses it. {error}{_remedy(error)}") from error
    where.check_loaded(session)
    return session


def _remedy(error: Exception) -> str:
    """A hint for types that the CPU has no kernels for: ONNX's own small ones, float64, bfloat16."""
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


def _create_in_place(model: ir.Model, options: Any, where: Providers, name: str) -> Any:
    """A session that uses the large weights of the file that the model came from. None if too many weights were
    computed since, or the runtime cannot use the file: an older one, or one that does not follow links."""
    tensors = [value.const_value for value in model.graph.initializers.values()]
    usable = [tensor for tensor in tensors if isinstance(tensor, MappedTensor) and _is_in_place(tensor)]
    if not usable or weight_bytes(model) - sum(tensor.nbytes for tensor in usable) > _FILE_FROM_BYTES:
        return None
    folder = Path(os.path.commonpath([tensor.file.path.parent for tensor in usable]))
    message = split(model, _is_in_place)
    for proto, tensor in message.apart():
        assert isinstance(tensor, MappedTensor)
        location = tensor.file.path.relative_to(folder).as_posix()
        refer(proto, location, tensor.offset, tensor.nbytes)
    options.add_session_config_entry(_FOLDER_OF_WEIGHTS, str(folder))
    if sum(tensor.nbytes for tensor in usable if tensor.dtype == ir.DataType.FLOAT) >= _UNPACKED_FROM_BYTES:
        options.add_session_config_entry("session.disable_prepacking", "1")
    files = mapped_files(model)
    release_memory()  # pieces of weights that were read
    try:
        with held_still(files):  # the runtime opens them by name
            return _create(message.proto.SerializeToString(), options, where, name)
    except ModelError as error:
        check_unchanged(files)  # the runtime's own error does not say that
        _LOG.debug("%s: weights are not used in place: %s", name, error)
        return None


def _is_in_place(tensor: ir.TensorProtocol) -> bool:
    """True if the bytes of a weight can be used in place: they are in a file with a name, and aligned."""
    if not isinstance(tensor, MappedTensor) or not tensor.file.path.is_absolute():
        return False
    return tensor.nbytes >= _EXTERNAL_FROM_BYTES and tensor.offset % max(1, int(tensor.dtype.itemsize)) == 0


def _create_from_file(model: ir.Model, options: Any, where: Providers, name: str) -> Any:
    """A session of a temporary file, or of the model's bytes if the file cannot be written."""
    with contextlib.ExitStack() as stack:
        try:
            folder = Scratch()
            stack.callback(folder.remove)
            path = folder.path / "model.onnx"
            ir.save(model, path, external_data="weights", size_threshold_bytes=_EXTERNAL_FROM_BYTES)
        except OSError as error:
            stack.close()
            _LOG.info("%s: no temporary file (%s), loading it from memory", name, error)
            return _create(ir.to_proto(model).SerializeToString(), options, where, name)
        session = _create(str(path), options, where, name)
        if os.name == "nt":  # mapped files cannot be removed there
            stack.pop_all()
            weakref.finalize(session, folder.remove)
        return session


def _runnable(message: Message, *, is_graph: bool) -> ir.Model | bytes:
    """A message as bytes, which saves reading it as a graph and writing that; as a graph if it has to be one, or if its
    weights go through a file."""
    return message.to_graph() if is_graph or message.weight_bytes > _FILE_FROM_BYTES else message.serialized()


def _with_outputs(model: ModelSource, extra: list[str]) -> ir.Model:
    """The graph of the model, or a copy with more outputs that shares its tensors."""
    if isinstance(model, (str, os.PathLike)):
        model = ir.load(model)
    elif not isinstance(model, ir.Model):
        model = ir.from_proto(onnx.load_model_from_string(model) if isinstance(model, bytes) else model)
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


def with_functions(model: ModelSource) -> ModelSource:
    """The model with functions for those of our operators that have none; the model itself if it has no such operators.

    The argument is not changed, and large weights are shared with it, or mapped from its file."""
    if isinstance(model, (str, os.PathLike)):
        read = onnx.load(os.fspath(model), load_external_data=False)
        return with_functions(ir.load(model)) if _lacks_functions(read) else model
    if isinstance(model, bytes):
        read = onnx.load_model_from_string(model)
        return add_portable_functions(read).SerializeToString() if _lacks_functions(read) else model
    if isinstance(model, onnx.ModelProto):
        return add_portable_functions(model) if _lacks_functions(model) else model
    if not any(node.domain == DOMAIN for node in model.graph.all_nodes()):
        return model
    if any(domain == DOMAIN for domain, _, _ in model.functions):
        return model
    if model.opset_imports.get("", 0) < CAST_LIKE_OPSET:  # there nodes change too, not just functions
        return ir.from_proto(add_portable_functions(ir.to_proto(model)))
    message = split(model, lambda tensor: tensor.nbytes > 0).proto  # functions only depend on types and shapes
    define_portable_functions(message)
    copy = model.clone()
    for function in message.functions:
        if function.domain == DOMAIN:
            written = ir.from_proto(function)
            copy.functions[written.identifier()] = written
    copy.opset_imports[DOMAIN] = 1
    copy.ir_version = max(copy.ir_version, _IR_VERSION_OF_FUNCTIONS)
    return copy


def _lacks_functions(model: onnx.ModelProto) -> bool:
    """True if our domain is declared, as in every model with one of its operators, and has no function."""
    is_declared = any(opset.domain == DOMAIN for opset in model.opset_import)
    return is_declared and not any(function.domain == DOMAIN for function in model.functions)
