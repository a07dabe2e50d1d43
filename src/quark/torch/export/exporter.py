"""Write quantized networks as files: ONNX, compared with torch, or safetensors with JSON."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import fx, nn
from torch.export import ExportedProgram

import quark
from quark.account import FileFacts
from quark.card import CARD_KEY, Card
from quark.errors import InvalidValueError, ModelError, UnsupportedOptionError, UnsupportedTypeError
from quark.files.foreign import REPORT, read_json
from quark.onnx.convert.graph_edits import convert_opset_version
from quark.onnx.insert import InsertOptions, insert
from quark.onnx.load.reading import read_proto
from quark.onnx.quantization.making import placed
from quark.onnx.save import SaveOptions, check_output, finish, write_model, write_text, writing
from quark.plan import QuantizationPlan
from quark.report.console import Console
from quark.text import get_logger
from quark.torch.capture import DynamicShapes
from quark.torch.export.card import card_of
from quark.torch.export.config.config import ExporterConfig, JsonExporterConfig
from quark.torch.export.deployable import KernelParityError, deployable, example_inputs, free_axes, samples_around
from quark.torch.export.exported_graph import NEWEST_OPSET, exported_graph
from quark.torch.export.language import LanguageModel, insert_language, language_graph
from quark.torch.export.parity import ParityReport, check_parity
from quark.torch.export.plan_of_taps import rename, values_of
from quark.torch.export.safetensors_file import export_safetensors
from quark.torch.export.widening import STAGES, WIDENED_OPSET, widen_weights
from quark.torch.language.architecture import is_language_model
from quark.torch.language.pipeline import QuantizedState
from quark.torch.runtime import RuntimeNetwork, simulate_runtime, unsigned
from quark.torch.train.networks import FrozenNetwork

FILE_NAME = "quark_model.onnx"
TORCH_OPSET = 18  # the oldest that torch's exporter writes
LEAST_OPSET = 14  # ONNX's converter brings neither Relu nor Add to an older one
NEW_NAMES = {"path": "output_dir", "example_input": "input_args", "opset": "opset_version"}

_LOG = get_logger(__name__)


@dataclass(frozen=True)
class ExportReport:
    """The file, the plan in its names, and how it compares with the network; `parity` is None if that was not
    checked. `notes` say what was changed for the runtime."""

    path: Path
    plan: QuantizationPlan
    parity: ParityReport | None
    opset: int
    notes: tuple[str, ...] = ()


def export_onnx(  # noqa: PLR0913 - AMD Quark's arguments, in its order
    model: nn.Module | ExportedProgram,
    output_dir: str | os.PathLike[str] | None = None,
    input_args: Any = None,
    opset_version: int | None = None,
    input_names: Sequence[str] = (),
    output_names: Sequence[str] = (),
    verbose: bool = False,
    do_constant_folding: bool = True,
    operator_export_type: Any = None,
    uint4_int4_flag: bool = False,
    dynamo: bool = False,
    *,
    file_name: str = FILE_NAME,
    dynamic_batch: bool = True,
    check: bool = True,
    has_external_data: bool = False,
    has_cache: bool = False,
    dynamic_shapes: DynamicShapes | None = None,
    example_input: Any = None,
    path: str | os.PathLike[str] | None = None,
    opset: int | None = None,
) -> ExportReport:
    """Write a network, quantized or float, as quark_model.onnx, or `file_name`, in the folder `output_dir`, which is
    created if necessary. Quantizers become QuantizeLinear and DequantizeLinear, block formats operators of
    com.amd.quark with portable functions.

    `input_args` is a tensor, a tuple of them or a dictionary by name. `opset_version` None takes the oldest from 18 on
    that supports the types; for 14 to 17, ONNX's converter has to know every operator. It knows LayerNormalization from
    17 on, and BatchNormalization that was not folded from 15 on. `input_names` and `output_names` name the inputs and
    outputs of the file, in order. `verbose` prints its nodes. The batch is dynamic unless `dynamic_batch` is False,
    which fixes it to that of the example; axes that the network was captured with as free stay free, such as the length
    of token ids. `dynamic_shapes` says which axes are free when a float model is traced here, as for
    `export_for_training`. A network that still trains is frozen first, in a copy. `check` runs the file in ONNX Runtime
    and compares it with the network: a ParityError names the first layer that differs, and the file is kept for
    inspection. NAME.json beside a quantized network has its card, for `quark reproduce`, the plan, the configuration
    and the comparison (null if it failed). What `simulate_runtime` returns is compared as such, and its file has
    unsigned activations. Where all layers agree and the runtime's 8-bit kernels are not exact on this processor,
    weights are stored in 16 bits instead, and the report has a note.

    A causal language model of Hugging Face has free batch and length: inputs input_ids and attention_mask, output
    logits; `input_args` is token ids, or a dictionary with both inputs. `has_cache` adds keys and values:
    past_key_values.0.key ... as inputs, of length 0 at first, and present.0.key ... as outputs; the mask then covers
    past and present, and positions are counted from it. Weights in groups, quantized alone, become MatMulNBits.

    `do_constant_folding`, `uint4_int4_flag` and `dynamo` make no difference: constants are folded where that changes no
    value, types of 4 bits are always written as such, and networks are always exported by `torch.export`.

    `example_input`, `path` and `opset` are the former arguments; they still work by name, with a DeprecationWarning.
    """
    former = {"example_input": example_input, "path": path, "opset": opset}
    given = [name for name, value in former.items() if value is not None]
    if given:
        warnings.warn(
            f"export_onnx({', '.join(f'{name}=...' for name in given)}): these arguments have new names: "
            "export_onnx(model, output_dir, input_args, opset_version, file_name='NAME.onnx')",
            DeprecationWarning,
            stacklevel=2,
        )
        for name, value in (("path", output_dir), ("example_input", input_args), ("opset", opset_version)):
            if name in given and value is not None:
                raise InvalidValueError(f"export_onnx: {NEW_NAMES[name]} and {name}: give one of them")
        if path is not None:
            output_dir = check_output(path).parent
        input_args = input_args if example_input is None else example_input
        opset_version = opset_version if opset is None else opset
    if not isinstance(output_dir, (str, os.PathLike)):
        raise UnsupportedTypeError(
            f"output_dir: expected the folder to write to, got {type(output_dir).__name__}; the arguments are "
            "export_onnx(model, output_dir, input_args)"
        )
    if operator_export_type is not None and getattr(operator_export_type, "name", operator_export_type) != "ONNX":
        raise UnsupportedOptionError(
            f"operator_export_type {operator_export_type}: all operators are exported as ONNX; leave it out"
        )
    if input_args is None:
        raise InvalidValueError("input_args: expected an example of the inputs: a tensor, a tuple or a dict of tensors")
    names = GraphNames(_names("input_names", input_names), _names("output_names", output_names))
    folder = _made(Path(output_dir))
    report = write_onnx(
        *(model, input_args, _file_in(folder, file_name) if path is None else path),
        opset=opset_version,
        dynamic_batch=dynamic_batch,
        check=check,
        has_external_data=has_external_data,
        names=names,
        has_cache=has_cache,
        dynamic_shapes=dynamic_shapes,
    )
    remarks = {
        "uint4_int4_flag": (uint4_int4_flag, "types of 4 bits are always written as such"),
        "dynamo": (dynamo, "networks are always exported by torch.export"),
        "do_constant_folding": (not do_constant_folding, "constants are folded where that changes no value"),
    }
    for name, (is_given, reason) in remarks.items():
        if is_given:
            _LOG.info("%s makes no difference: %s", name, reason)
    if verbose:
        console = Console()
        for node in read_proto(report.path).graph.node:
            console.say(f"{node.op_type}({', '.join(node.input)}) -> {', '.join(node.output)}")
    return report


def _names(argument: str, names: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(names, str):
        raise UnsupportedTypeError(f"{argument} {names!r}: expected a list of names")
    return tuple(names or ())


def _made(folder: Path) -> Path:
    """Return the folder, created if necessary."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _file_in(folder: Path, file_name: str) -> Path:
    if Path(file_name).name != file_name or not file_name.endswith(".onnx"):
        raise InvalidValueError(f"file_name {file_name!r}: expected a name without folders that ends in .onnx")
    return folder / file_name


@dataclass(frozen=True)
class GraphNames:
    """Names for the inputs and the outputs of a file, in order; those that are not given stay as they are."""

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def give(self, model: ir.Model, plan: QuantizationPlan) -> QuantizationPlan:
        """Rename the model's inputs and outputs, and return the plan in the new names."""
        before = {value: str(value.name) for value in values_of(model)}
        for kind, values, names in (
            ("input", list(model.graph.inputs), self.inputs),
            ("output", list(model.graph.outputs), self.outputs),
        ):
            if len(names) > len(values):
                raise InvalidValueError(
                    f"{kind}_names {list(names)}: expected at most {len(values)}, the number of {kind}s of the network"
                )
            for value, name in zip(values, names, strict=False):
                if not isinstance(name, str) or not name:
                    raise InvalidValueError(f"{kind}_names: {name!r}, expected a name")
                rename(model, value, name)
                if value.name != name:
                    raise InvalidValueError(f"{kind}_names: {name!r} is the name of another input, output or constant")
        renamed = {old: str(value.name) for value, old in before.items() if value.name != old}
        tensors = (replace(entry, tensor=renamed.get(entry.tensor, entry.tensor)) for entry in plan.tensors)
        return replace(plan, tensors=tuple(tensors)) if renamed else plan


def write_onnx(  # noqa: PLR0913 - options of the public interface, by keyword
    model: nn.Module | ExportedProgram,
    example_input: Any,
    path: str | os.PathLike[str],
    *,
    opset: int | None = None,
    dynamic_batch: bool = True,
    check: bool = True,
    has_external_data: bool = False,
    names: GraphNames | None = None,
    has_cache: bool = False,
    dynamic_shapes: DynamicShapes | None = None,
) -> ExportReport:
    """Write a network as the ONNX file `path`; see `export_onnx`."""
    target = check_output(path)
    if opset is not None and not (isinstance(opset, int) and LEAST_OPSET <= opset <= NEWEST_OPSET):
        raise InvalidValueError(
            f"opset {opset!r}: expected {LEAST_OPSET} to {NEWEST_OPSET}, or None for the oldest that will do"
        )
    if has_cache or is_language_model(model):
        options = SaveOptions(has_external_data=has_external_data)
        return _write_language_model(model, example_input, target, options, opset, names, check, has_cache)
    is_simulated = isinstance(model, RuntimeNetwork)
    network = deployable(model.network if isinstance(model, RuntimeNetwork) else model, example_input, dynamic_shapes)
    example = example_inputs(network, example_input)
    form = ExportForm(opset, dynamic_batch, has_external_data, is_simulated, names or GraphNames())
    free = free_axes(network, example, has_dynamic_batch=dynamic_batch)

    def written_with_card(*wider: Any) -> WrittenGraph:
        # before the comparison: if that fails, the file stays, and must not lie beside the card of an earlier one
        result = write_graph(network, example, target, form, *wider)
        _with_card(result, result.report)
        return result

    def checked(written: WrittenGraph) -> ExportReport:
        runtime = simulate_runtime(network) if isinstance(network, FrozenNetwork) and is_simulated else None
        parity = check_parity(network, target, samples_around(example, free), written.values, runtime)
        _LOG.info("%s: ONNX Runtime and torch agree: %s", target.name, parity)
        return replace(written.report, parity=parity)

    written = written_with_card()
    if not check:
        return written.report
    try:
        return _with_card(written, checked(written))
    except KernelParityError:
        if opset is not None and opset < WIDENED_OPSET:
            raise
        for operators in STAGES:
            wider = written_with_card(max(written.report.opset, WIDENED_OPSET), operators)
            try:
                report = checked(wider)
            except KernelParityError:
                continue
            for note in report.notes:
                _LOG.warning("%s: %s", target.name, note)
            return _with_card(wider, report)
        written_with_card()
        raise


@dataclass(frozen=True)
class ExportForm:
    """The options that the bytes of a file depend on."""

    opset: int | None = None
    dynamic_batch: bool = True
    has_external_data: bool = False
    is_simulated: bool = False
    names: GraphNames = GraphNames()

    @property
    def older(self) -> int | None:
        """The opset to convert to; None if torch writes the wanted one."""
        return self.opset if self.opset is not None and self.opset < TORCH_OPSET else None


@dataclass(frozen=True)
class WrittenGraph:
    """A file before it is compared; `values` are the names of what the network computes. `card` is None if the origin
    of the network is unknown, and `config` if it is in float."""

    report: ExportReport
    values: Mapping[str, str]
    result: FileFacts
    card: Card | None
    config: Mapping[str, Any] | None


def write_graph(
    network: fx.GraphModule,
    example: tuple[torch.Tensor, ...],
    target: Path,
    form: ExportForm,
    wanted: int | None = None,
    widened: Sequence[str] = (),
    card: Card | None = None,
) -> WrittenGraph:
    """Write the file; weights of the `widened` operators get 16 bits. `wanted` is the opset that torch writes, by
    default the one of the form. The file gets `card`, or its own where None."""
    if wanted is None:
        wanted = form.opset if form.older is None else TORCH_OPSET
    free = free_axes(network, example, has_dynamic_batch=form.dynamic_batch)
    graph, plan, computed = exported_graph(network, example, free, opset=wanted)
    plan = form.names.give(graph, plan)
    plan = unsigned(plan) if form.is_simulated else plan
    plan, wide = widen_weights(graph, plan, widened)
    version = form.older or graph.opset_imports[""]
    insert(graph, plan, InsertOptions(has_casts=True))
    values = computed_names(graph, computed)
    if card is None and isinstance(network, FrozenNetwork) and network.origin is not None:
        said = {**vars(form), **vars(form.names), "wanted": wanted}
        card = card_of(network.origin, network, example, plan, said, widened)
    options = SaveOptions(has_external_data=form.has_external_data)
    metadata = _metadata(plan) | ({} if card is None else {CARD_KEY: card.inside().to_json()})
    message = finish(graph, metadata, options)
    try:
        model = message if form.older is None else convert_opset_version(message.filled(), form.older)
    except ModelError as error:
        raise ModelError(
            f"opset {form.older}: torch exports networks with {TORCH_OPSET} or newer, and this one cannot be "
            f"converted: {error.__cause__ or error}. Leave the opset out, or give {TORCH_OPSET} to {NEWEST_OPSET}"
        ) from error
    result = write_model(model, target, options)
    config = dict(getattr(network, "configuration", {})) if len(plan.tensors) else None
    return WrittenGraph(
        ExportReport(target, plan, None, version, _notes_of(wide, widened)), values, result, card, config
    )


def _with_card(written: WrittenGraph, report: ExportReport) -> ExportReport:
    """Write the JSON beside a quantized network, and return the report."""
    if written.config is not None:
        card = written.card and placed(written.card, report.path, None, None, written.result)
        content = {
            "file": report.path.name,
            "result": asdict(written.result),
            "opset": report.opset,
            **({} if card is None else {"card": card.to_dict()}),
            "plan": json.loads(report.plan.to_json()),
            "config": written.config,
            "parity": None if report.parity is None else report.parity.to_json(),
        }
        write_text(json.dumps(content, indent=1, default=str), report.path.with_suffix(".json"))
    return report


def record_paths(path: Path, source: Any, data: Any) -> None:
    """Write the places of the weights and the data, relative to the file, into the JSON beside it."""
    beside = path.with_suffix(".json")
    content = read_json(beside, f"'{beside}'", REPORT)
    card = Card.from_dict(content["card"])
    content["card"] = placed(card, path, source, data, card.result).to_dict()
    write_text(json.dumps(content, indent=1), beside)


def _notes_of(tensors: Sequence[str], operators: Collection[str]) -> tuple[str, ...]:
    note = (
        f"{len(tensors)} weights of {', '.join(operators)} are stored in 16 bits, and these layers run in float: on "
        "this processor ONNX Runtime's 8-bit kernels are not exact for their numbers"
    )
    return (note,) if tensors else ()


def _write_language_model(
    model: Any,
    example_input: Any,
    target: Path,
    options: SaveOptions,
    opset: int | None,
    names: GraphNames | None,
    check: bool,
    has_cache: bool,
) -> ExportReport:
    if not is_language_model(model):
        raise UnsupportedTypeError(
            f"has_cache: only causal language models of Hugging Face have a cache, and this is a {type(model).__name__}"
        )
    if opset is not None and opset < TORCH_OPSET:
        raise InvalidValueError(f"opset {opset}: language models are written with {TORCH_OPSET} to {NEWEST_OPSET}")
    network = LanguageModel(model, has_cache=has_cache)
    example = network.example(example_input)
    with language_graph(network, example, opset) as exported:
        graph, plan, version = exported.graph, exported.plan, exported.graph.opset_imports[""]
        plan = plan if names is None else names.give(graph, plan)
        insert_language(graph, plan)
        values = computed_names(graph, exported.values)
        write_model(finish(graph, _metadata(plan), options), target, options)
    parity = None
    if check:
        parity = check_parity(network, target, network.batches(example), values)
        _LOG.info("%s: ONNX Runtime and torch agree: %s", target.name, parity)
    return ExportReport(target, plan, parity, version)


def _metadata(plan: QuantizationPlan) -> dict[str, str]:
    return {"quark.version": quark.__version__, "quark.plan_sha256": plan.digest}


def computed_names(graph: ir.Model, computed: Mapping[str, ir.Value]) -> dict[str, str]:
    """The names in the graph of values that are still there. MatMulNBits takes a layer's place with the name of its
    result; integer operators with scales of run time do not keep it."""
    there = {str(value.name) for node in graph.graph for value in node.outputs}
    return {tensor: str(value.name) for tensor, value in computed.items() if str(value.name) in there}


class ModelExporter:
    """Writes quantized networks to `export_dir`, which is created if necessary.

    >>> import tempfile, torch
    >>> from quark.torch import ModelQuantizer
    >>> from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
    >>> from quark.torch.quantization.config.type import Dtype
    >>> weights = Config(global_quant_config=QuantizationConfig(weight=QuantizationSpec(Dtype.int8)))
    >>> network = ModelQuantizer(weights).quantize_model(torch.nn.Linear(8, 2), [torch.rand(4, 8)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ModelExporter(export_dir=folder).export_onnx_model(network, torch.rand(1, 8)).name
    'quark_model.onnx'
    """

    def __init__(self, config: ExporterConfig | None = None, export_dir: str | os.PathLike[str] = ".") -> None:
        if config is not None and not isinstance(config, ExporterConfig):
            raise UnsupportedTypeError(f"config: expected an ExporterConfig, got {type(config).__name__}")
        self.config = ExporterConfig() if config is None else config
        self.export_dir = Path(export_dir)
        self.report: ExportReport | None = None  # the report on the last ONNX file

    def export_onnx_model(  # noqa: PLR0913 - AMD Quark's arguments, in its order
        self,
        model: nn.Module,
        input_args: Any = None,
        input_names: Sequence[str] = (),
        output_names: Sequence[str] = (),
        verbose: bool = False,
        opset_version: int | None = None,
        do_constant_folding: bool = True,
        operator_export_type: Any = None,
        uint4_int4_flag: bool = False,
        *,
        file_name: str = FILE_NAME,
        dynamic_batch: bool = True,
        check: bool = True,
        example_input: Any = None,
        opset: int | None = None,
    ) -> Path:
        """Write the network as `file_name` in the folder, and return the path.

        The arguments are those of `export_onnx`; `example_input` and `opset` are former names. A name in the place of
        `input_names` is that of the file. With a `json_export_config`, JSON is written beside language models too: the
        plan, the configuration and the comparison with torch.
        """
        name = input_names if isinstance(input_names, str) else file_name
        report = export_onnx(
            model,
            self.export_dir,
            input_args if example_input is None else example_input,
            opset_version if opset is None else opset,
            () if isinstance(input_names, str) else input_names,
            output_names,
            verbose,
            do_constant_folding,
            operator_export_type,
            uint4_int4_flag,
            file_name=name,
            dynamic_batch=dynamic_batch,
            check=check,
        )
        self.report = report
        if self.config.json_export_config is not None and is_language_model(model):
            state = getattr(model, "quark", None)
            config = state.settings.config if isinstance(state, QuantizedState) else {}
            content = {
                "file": report.path.name,
                "opset": report.opset,
                "plan": json.loads(report.plan.to_json()),
                "config": dict(config),
                "parity": None if report.parity is None else report.parity.to_json(),
            }
            write_text(json.dumps(content, indent=1, default=str), report.path.with_suffix(".json"))
        return report.path

    def export_safetensors_model(
        self, model: nn.Module, quant_config: Any = None, custom_mode: str = "quark"
    ) -> tuple[Path, Path]:
        """Write the state of the network as safetensors, with JSON; see `export_safetensors`. `quant_config` is that of
        the quantizer; the model has it, and another one is an error."""
        if quant_config is not None:
            _check_same_config(model, quant_config)
        options = self.config.json_export_config or JsonExporterConfig()
        folder = _made(self.export_dir)
        return export_safetensors(model, folder, custom_mode, options.weight_format, options.pack_method)


def _check_same_config(model: nn.Module, quant_config: Any) -> None:
    """Raise if a model was quantized by another configuration."""
    state = getattr(model, "quark", None)
    known = state.settings.config if isinstance(state, QuantizedState) else getattr(model, "configuration", None)
    if known and hasattr(quant_config, "to_dict") and quant_config.to_dict() != dict(known):
        raise InvalidValueError(
            "quant_config is not what the model was quantized by; leave it out, or hand the config of the quantizer"
        )
