"""Build an exported network again from its card, and compare the bytes.

    float module from the user -> compare its state and the data with the card's -> quantize -> load what was trained
    -> export -> compare

A card cannot hold a module: a function of the user's returns it, alone or with the calibration data. If the network was
trained after calibration, its state dict has to be given too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from quark.card import Card, TorchFacts, differences, platform_facts
from quark.errors import InvalidValueError, UnsupportedOptionError, UnsupportedTypeError
from quark.files.foreign import Fields
from quark.files.output import scratch_folder
from quark.measures import load_function
from quark.onnx.data.array_files import read_array_file
from quark.onnx.load.structure import MIN_OPSET
from quark.onnx.quantization.making import FoundCard, placed, read_card
from quark.onnx.quantization.reproduction import Reproduction, expected_hash, file_differences, file_hash
from quark.onnx.save import check_output, together, write_text
from quark.torch.capture import signature_of
from quark.torch.export.deployable import deployable, example_inputs
from quark.torch.export.exported_graph import NEWEST_OPSET
from quark.torch.export.exporter import ExportForm, GraphNames, WrittenGraph, write_graph
from quark.torch.origin import source_facts
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.pipeline import ModelQuantizer
from quark.torch.train.networks import FrozenNetwork, QuantizedNetwork

Quantized = Callable[[Card], QuantizedNetwork]

NAME_FIELDS = tuple(field.name for field in fields(GraphNames))
FORM_FIELDS = tuple(field.name for field in fields(ExportForm) if field.name != "names")


def reproduce_export(
    card: str | os.PathLike[str],
    module: str | Callable[[], Any] | None = None,
    data: str | os.PathLike[str] | None = None,
    state: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
) -> Reproduction:
    """Build the file of a torch export again, and compare.

    `module` is a function, or FILE.py:FUNCTION, that returns the float module, or (module, loader). `data` is an
    archive of arrays named as the inputs, instead of the loader. `state` is the state dict of a quantized module
    that was trained. `output` keeps the result.
    """
    found_card = read_card(Path(card))
    if found_card.card.torch is None:
        raise InvalidValueError(f"card '{found_card.file}' is of a file that quark.onnx made: it needs no module")
    if module is None:
        raise InvalidValueError(
            f"card '{found_card.file}' is of the torch module {found_card.card.source.name}, which a card cannot hold: "
            "give a function that returns it, alone or with the calibration data: --module FILE.py:FUNCTION"
        )
    function = load_function(module, "module")[0] if isinstance(module, str) else module

    def quantized(known: Card) -> QuantizedNetwork:
        return _quantized(known, function, data, found_card.file)

    script = module.rpartition(":")[0] if isinstance(module, str) else None
    return rebuilt(found_card, quantized, state, output, reads=(script, data))


def rebuilt(
    found_card: FoundCard,
    quantized: Quantized,
    state: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    paths: tuple[Any, Any] = (None, None),
    reads: tuple[Any, ...] = (),
) -> Reproduction:
    """Export what `quantized` returns in the form of the card, and compare. `paths` are source and data, for the JSON
    beside `output`. They and the files of `reads` are not overwritten."""
    card = found_card.card
    facts = card.torch
    assert facts is not None
    if card.functions:
        raise UnsupportedOptionError(
            f"card '{found_card.file}': the network was made with {', '.join(card.functions)}, which a card cannot "
            "hold; run the script that made the file again"
        )
    if facts.is_trained and state is None and not facts.request:
        raise InvalidValueError(
            f"card '{found_card.file}': the network was trained after it was quantized, which a card cannot repeat: "
            "give the state_dict of the quantized module with --state"
        )
    (form, wanted), zeros = _form_of(facts, found_card.file), _example_of(facts, found_card.file)
    expected, warnings = expected_hash(found_card)
    target = None if output is None else check_output(output, found_card.file, found_card.model, state, *paths, *reads)
    network = quantized(card)
    if state is not None:
        _load(network, Path(state))
    frozen = deployable(network)
    assert isinstance(frozen, FrozenNetwork)
    origin = frozen.origin
    assert origin is not None
    if origin.state_sha256 != facts.state_sha256:
        what = f"state '{state}'" if state is not None else "the quantized network"
        warnings.append(f"{what} has other numbers than the card's: SHA-256 {origin.state_sha256[:16]}")
    example = example_inputs(frozen, zeros)
    with scratch_folder() as folder:
        name = (
            found_card.model.name if found_card.model is not None else card.result.name if card.result else "model.onnx"
        )
        path = folder / name

        def written(place: Path, known: Card | None) -> WrittenGraph:
            return write_graph(frozen, example, place, form, wanted, facts.widened, known)

        own = written(path, None).card
        assert own is not None
        warnings += differences(card, replace(own, platform=platform_facts()))
        made = written(path, card).result
        is_same = expected in (made.sha256, file_hash(path))
        differing: list[str] = []
        if is_same:
            made = replace(made, sha256=expected)
        elif found_card.model is None:
            differing = ["the file itself is not at hand: what differs in it is unknown"]
        else:
            differing = file_differences(found_card.model, path) or [
                "other bytes for the same nodes, weights and metadata"
            ]
        if target is not None:
            with together(target):
                kept = card if is_same else own
                beside = placed(kept, target, *paths, written(target, kept).result)
                write_text(json.dumps({"card": beside.to_dict()}, indent=1), target.with_suffix(".json"))
    return Reproduction(expected, made, tuple(warnings), tuple(differing))


def _quantized(card: Card, function: Callable[[], Any], data: Any, file: Path) -> QuantizedNetwork:
    """Return the calibrated network; an InvalidValueError says if the module or the data is not the card's."""
    try:
        returned = function()
    except (Exception, SystemExit) as error:  # an exit status of 0 would say that the bytes are the same
        raise InvalidValueError(f"the function that returns the module failed: {_told(error)}") from error
    module, loader = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(module, (nn.Module, ExportedProgram)):
        raise UnsupportedTypeError(
            f"the function returned {type(module).__name__}: expected the float module, or (module, loader)"
        )
    source = source_facts(module)
    if source.sha256 != card.source.sha256:
        raise InvalidValueError(
            f"the module {source.name} is not the card's: its state has SHA-256 {source.sha256[:16]}, expected "
            f"{card.source.sha256[:16]} of {card.source.name}"
        )
    if data is not None:
        loader = _batches_of(Path(data), signature_of(module).names, card.data.batch_size)
    if loader is None and card.data.sha256 and card.data.kind.value == "object":
        raise InvalidValueError(
            f"card '{file}': the network was calibrated on {card.data.samples} samples: return (module, loader), or "
            "give arrays named as the inputs with --calib"
        )
    try:
        config = Config.from_dict(card.config)
    except (TypeError, ValueError) as error:
        raise InvalidValueError(f"card '{file}': field 'config': {error}") from error
    network = ModelQuantizer(config).quantize_model(module, loader)
    if not isinstance(network, QuantizedNetwork) or network.origin is None:
        raise UnsupportedTypeError(f"{source.name}: a language model is quantized as a module: see quark quantize-llm")
    facts = network.origin.data
    if card.data.sha256 != facts.sha256:
        same_count = facts.samples == card.data.samples
        why = "other values in them" if same_count else f"{facts.samples} samples, expected {card.data.samples}"
        raise InvalidValueError(f"the calibration data is not the card's: {why}, or batches of other sizes")
    return network


def _batches_of(path: Path, names: tuple[str, ...], size: int) -> Iterator[dict[str, torch.Tensor]]:
    arrays = read_array_file(path, f"data '{path}'", names)
    if not arrays:
        raise InvalidValueError(f"data '{path}': expected arrays named {', '.join(names)}")
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    for start in range(0, min(map(len, tensors.values())), size):
        yield {name: tensor[start : start + size] for name, tensor in tensors.items()}


def _load(network: QuantizedNetwork, path: Path) -> None:
    """Read a state dict, as torch.save or safetensors writes it."""
    if not path.is_file():
        raise InvalidValueError(f"state '{path}': there is no such file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and safetensors have no base class for invalid files
        raise InvalidValueError(f"state '{path}' cannot be read: {_told(error)}") from error
    inner = content.get("model") if isinstance(content, Mapping) else None
    try:
        network.load_state_dict(inner if isinstance(inner, Mapping) else content)
    except (RuntimeError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InvalidValueError(f"state '{path}' is not of this quantized module: {reason}") from error


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _form_of(facts: TorchFacts, file: Path) -> tuple[ExportForm, int | None]:
    """Return the options of the export, and the opset that torch wrote if it was not the first choice."""
    options = Fields(facts.options, f"card '{file}'", "torch.options")
    options.refuse_others((*FORM_FIELDS, *NAME_FIELDS, "wanted"))
    opset, wanted = (
        options.integer(name, MIN_OPSET, NEWEST_OPSET) if options.value(name) is not None else None
        for name in ("opset", "wanted")
    )
    flags = {name: options.boolean(name) for name in FORM_FIELDS if name != "opset"}
    names = GraphNames(*(options.texts(name) for name in NAME_FIELDS))
    return ExportForm(opset, **flags, names=names), wanted


def _example_of(facts: TorchFacts, file: Path) -> dict[str, torch.Tensor]:
    """Return zeros: values of the example do not affect the file."""
    example = {}
    for name, (dtype, shape) in facts.inputs.items():
        where = f"card '{file}': field 'torch.inputs.{name}'"
        kind = getattr(torch, dtype, None) if dtype.isidentifier() else None
        if not isinstance(kind, torch.dtype):
            raise InvalidValueError(f"{where}: {dtype!r} is not a type of torch")
        try:
            example[name] = torch.zeros(shape, dtype=kind)
        except (RuntimeError, MemoryError) as error:
            raise InvalidValueError(f"{where}: there is no tensor of {len(shape)} such dimensions: {error}") from error
    return example
