"""Build a quantized file again from its card, and compare the bytes.

    read the card -> find the float model and the data -> compare their hashes with the card's -> quantize -> compare

The new file gets the card of the original, because other versions or another processor are reported beforehand and do
not change a model by themselves. Equal bytes then mean that everything else is equal.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from quark.account import FileFacts
from quark.card import Card, DataKind, differences, platform_facts
from quark.errors import InvalidValueError, ModelError, UnsupportedOptionError
from quark.files.foreign import check_folder, short
from quark.files.output import scratch_folder
from quark.onnx.data import Preprocessing
from quark.onnx.load import load
from quark.onnx.load.reading import read_proto, read_whole
from quark.onnx.pack import pack_message
from quark.onnx.quantization.config.content import naming, without_places
from quark.onnx.quantization.config.files import config_from
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.data import Data
from quark.onnx.quantization.making import FoundCard, card_of, data_facts, placed, put_card, read_card
from quark.onnx.quantization.pipeline import Outcome, quantize_graph
from quark.onnx.quantization.quantizer import files_read
from quark.onnx.save import SaveOptions, check_output, together, write_model, write_text
from quark.onnx.session import release_memory
from quark.onnx.settings import Settings
from quark.report.quantities import count_of, listed

MOST_ENTRIES = 200_000  # entries of a folder that a card names
_PIECE = 1 << 22


@dataclass(frozen=True)
class Reproduction:
    """`expected` is the hash of the file that the card is about. `warnings` say what has changed since then, and
    `differences` how the new file differs."""

    expected: str
    found: FileFacts
    warnings: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        """True if the new file has the expected bytes."""
        return self.expected == self.found.sha256

    def to_dict(self) -> dict[str, Any]:
        """The result as a dictionary for JSON."""
        return {
            "same": self.is_same,
            "expected_sha256": self.expected,
            "found_sha256": self.found.sha256,
            "warnings": list(self.warnings),
            "differences": list(self.differences),
        }


def reproduce(
    card: str | os.PathLike[str],
    model: str | os.PathLike[str] | None = None,
    data: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
) -> Reproduction:
    """Build the file of a card again, and compare. `model` and `data` are by default looked for where the card says and
    beside it; if they are not the card's, an error is raised before the work. The result is written to `output`, with
    its card beside it, if that is given."""
    found_card = read_card(Path(card))
    if found_card.card.torch is not None:
        raise UnsupportedOptionError(
            f"card '{found_card.file}' is of a torch module: quark.torch.export.reproduction.reproduce_export reads it"
        )
    if found_card.card.functions:
        raise UnsupportedOptionError(
            f"card '{found_card.file}': {', '.join(found_card.card.functions)} was a Python function, which a card "
            "cannot hold; run the script that made the file again"
        )
    expected, warnings = expected_hash(found_card)
    settings = naming(f"card '{found_card.file}'", settings_from, found_card.card)
    source = find_source(found_card, None if model is None else Path(model))
    samples = find_data(found_card, None if data is None else Path(data))
    warnings += _compare_inputs(found_card.card, source, samples, settings)
    reads = (source, found_card.file, found_card.model, samples.source, *files_read(settings))
    target = None if output is None else check_output(output, *reads)
    outcome = quantize_graph(source, samples, settings)
    if outcome.digest.hexdigest() != found_card.card.source.sha256:
        raise ModelError(f"model '{source}' changed after it was compared with the card: start again")
    # as configured; a later `quark pack` writes one file if possible
    is_one = bool(found_card.card.packing) and found_card.model is not None and not external_files(found_card.model)
    options = SaveOptions() if is_one else settings.save
    made, differing = _compared(outcome, found_card, expected, options)
    if target is not None:
        # a file that differs from the card's gets a card of its own
        own = found_card.card if made.sha256 == expected else replace(outcome.card, packing=found_card.card.packing)
        with together(target):
            beside = placed(own, target, source, samples.source, _write(outcome, own, target, options))
            outcome.check_unchanged()
            write_text(json.dumps({"card": beside.to_dict()}, indent=1), target.with_suffix(".json"))
    return Reproduction(expected, made, tuple(warnings), tuple(differing))


def expected_hash(found_card: FoundCard) -> tuple[str, list[str]]:
    """The hash that the file should have: that of the model if it was given, else the card's, with a warning if the
    model beside the card has changed."""
    result = found_card.card.result
    if found_card.model is None:
        if result is None:
            raise InvalidValueError(
                f"card '{found_card.file}' does not contain the hash of its file, which is not next to it either"
            )
        return result.sha256, []
    now = file_hash(found_card.model)
    if found_card.file == found_card.model or result is None or result.sha256 == now:
        return now, []
    warning = f"'{found_card.model.name}' next to the card has changed since: SHA-256 {now[:16]}"
    return result.sha256, [warning + _old_hash(found_card.card, bool(external_files(found_card.model)))]


def _old_hash(card: Card, has_external_data: bool) -> str:
    """An addition to a message about different hashes if they may not be comparable, else nothing."""
    if not has_external_data or not card.versions.get("quark", "").startswith("1.0."):
        return ""
    return (
        "; if the card is from the release 1.0.0, the hashes cannot be compared: quark 1.0 hashed external data in "
        "another way"
    )


def settings_from(card: Card) -> Settings:
    """The settings of the card's config. Files and folders that it names are left out: a card could name any to write
    to, and any library to run."""
    _refuse_functions(card.config, "config")
    settings = replace(settings_of(config_from(dict(without_places(card.config)))), name=card.config_name)
    finetune, mix = settings.refine.finetune, settings.mix
    if finetune is not None:
        settings = replace(settings, refine=replace(settings.refine, finetune=replace(finetune, folder=None)))
    if mix is not None and not mix.is_plan_given:
        settings = replace(settings, mix=replace(mix, plan_file=None, cache_file=None))
    return replace(settings, calibrate=replace(settings.calibrate, cache=None))


def _refuse_functions(content: Any, where: str) -> None:
    """Raise an error if a config names a Python function as its measure: loading it would run untrusted code."""
    if isinstance(content, Mapping):
        for name, value in content.items():
            if name == "Metric" and isinstance(value, str) and ":" in value.partition("?")[0]:
                raise UnsupportedOptionError(
                    f"card: field '{where}.{name}' is {short(value)}, a Python function, which is not run from a card; "
                    "run the script that made the file again"
                )
            _refuse_functions(value, f"{where}.{name}")


def find_source(found_card: FoundCard, given: Path | None) -> Path:
    """The float model: as given, where the card says, or a file beside the card with the same size and content."""
    card, folder = found_card.card, found_card.file.parent
    if given is not None:
        return given
    recorded = folder / card.paths["source"] if "source" in card.paths else None
    if recorded is not None and recorded.is_file():
        return recorded
    named = folder / card.source.name
    if card.source.name and named.is_file():
        return named
    for path in sorted(folder.glob("*.onnx")) if card.torch is None else ():
        is_alike = path != found_card.model and path.stat().st_size == card.source.bytes
        if is_alike and file_hash(path) == card.source.sha256:
            return path
    what = "weights" if card.torch else "float model"
    raise InvalidValueError(
        f"card '{found_card.file}': its {what} {card.source.name or f'of {card.source.bytes} bytes'} was not found; "
        "give it with --model"
    )


def find_data(found_card: FoundCard, given: Path | None) -> Data:
    """The calibration data: as given, where the card says, or beside the card under its name."""
    facts = found_card.card.data
    fields = facts.preprocessing
    try:
        preprocessing = Preprocessing(**fields)
    except (TypeError, InvalidValueError) as error:
        raise InvalidValueError(f"card '{found_card.file}': field 'data.preprocessing': {error}") from error
    if facts.kind in (DataKind.RANDOM, DataKind.UNUSED):
        return Data(None, facts.count, facts.batch_size, preprocessing, is_random=True)
    folder = found_card.file.parent
    names = ["", ""] if facts.kind is DataKind.OBJECT else [found_card.card.paths.get("data", ""), facts.name]
    # the path ends in the name of the data, so that a card cannot lead to files above it
    named = [folder / name for name in names if name and name.rpartition("/")[2] == (facts.name or name)]
    path = next((candidate for candidate in ([given] if given is not None else named) if candidate.exists()), None)
    if path is not None and given is None and path.is_dir():
        check_folder(
            path, f"card '{found_card.file}': its calibration data '{path}', to be given by --calib,", MOST_ENTRIES
        )
    if path is None:
        what = f"'{facts.name}'" if facts.name else f"{facts.samples} samples of a {facts.kind.value}"
        missing = f"'{given}': there is no such file or folder" if given else f"{what} was not found; give --calib"
        raise InvalidValueError(f"card '{found_card.file}': its calibration data {missing}")
    return Data(path, facts.count, facts.batch_size, preprocessing)


def _compare_inputs(card: Card, source: Path, data: Data, settings: Settings) -> list[str]:
    """Raise an error if the model or the data is not the card's. Returns what else has changed."""
    loaded = load(source, settings.load)
    if loaded.sha256 != card.source.sha256:
        raise InvalidValueError(
            f"model '{source}' is not the card's: SHA-256 {loaded.sha256[:16]}, expected {card.source.sha256[:16]}"
            f"{_old_hash(card, loaded.bytes > source.stat().st_size)}"
        )
    samples = data.open(loaded.model, settings)
    facts = data_facts(data, samples, settings)
    if card.data.sha256 and facts.sha256 != card.data.sha256:
        counts = f"{facts.samples} + {facts.held_out} samples, expected {card.data.samples} + {card.data.held_out}"
        same_count = (facts.samples, facts.held_out) == (card.data.samples, card.data.held_out)
        why = "other values in them" if same_count else counts
        raise InvalidValueError(f"calibration data '{data.source or 'random'}' is not the card's: {why}")
    now = card_of(settings, loaded, facts, card.plan_sha256)
    changed = differences(card, replace(now, data=card.data, packing=card.packing, platform=platform_facts()))
    del loaded, samples
    release_memory()
    return changed


def _compared(
    outcome: Outcome, found_card: FoundCard, expected: str, options: SaveOptions
) -> tuple[FileFacts, list[str]]:
    """The new file, and how it differs. It is written under the original name, since the model names its external
    weights after it."""
    known = found_card.card.result.name if found_card.card.result is not None else ""
    name = found_card.model.name if found_card.model is not None else known or "model.onnx"
    with scratch_folder() as folder:
        path = folder / name
        made = _write(outcome, found_card.card, path, options)
        outcome.check_unchanged()
        if expected in (made.sha256, file_hash(path)):
            return replace(made, sha256=expected), []
        if found_card.model is None:
            differing = ["the file itself is not at hand: what differs in it is unknown"]
        else:
            differing = file_differences(found_card.model, path) or [
                "other bytes for the same nodes, weights and metadata"
            ]
        if outcome.card.plan_sha256 != found_card.card.plan_sha256:
            differing.insert(0, "the plan: formats, scales or readers of some tensors")
        return made, differing


def _write(outcome: Outcome, card: Card, target: Path, options: SaveOptions) -> FileFacts:
    put_card(outcome.message.proto, card)
    if not card.packing:
        return write_model(outcome.message, target, options)
    packed, facts = pack_message(outcome.message, card.packing)
    if not facts.packed:
        raise InvalidValueError(f"the card says packing '{card.packing}': {facts.remarks[0]}")
    return write_model(packed, target, options)


# ---------------------------------------------------------------- comparing files
def file_hash(path: Path) -> str:
    """Return `quark.account.FileFacts.sha256` of this model, external data included."""
    state = hashlib.sha256()
    for piece in _pieces(path):
        state.update(piece)
    for file in sorted(external_files(path)):
        external = hashlib.sha256()
        for piece in _pieces(file):
            external.update(piece)
        state.update(external.digest())
    return state.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece


def external_files(path: Path) -> list[Path]:
    """The files that hold weights of the model, in the order in which it first names them."""
    proto = read_proto(path)
    names = [
        entry.value
        for tensor in proto.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    ]
    files = [path.parent / name for name in dict.fromkeys(names)]
    for file in files:
        if file.parent.resolve() != path.parent.resolve() or not file.is_file():
            raise ModelError(f"model '{path}': its weights '{file.name}' are expected in the same folder")
    return files


def file_differences(first: Path, second: Path) -> list[str]:
    """The differences of the second file, as phrases for people; empty if only the order of bytes could differ."""
    first_model, second_model = read_whole(first), read_whole(second)
    before, after = _tensors(first_model), _tensors(second_model)
    groups = {
        "missing initializer": [name for name in before if name not in after],
        "new initializer": [name for name in after if name not in before],
        "different initializer": [name for name in before if name in after and before[name] != after[name]],
    }
    nodes_before, nodes_after = (
        {str(node.name): ir.serde.serialize_node(node).SerializeToString(deterministic=True) for node in model.graph}
        for model in (first_model, second_model)
    )
    names = {**nodes_before, **nodes_after}
    groups["different node"] = [name for name in names if nodes_before.get(name) != nodes_after.get(name)]
    remarks = [f"{count_of(len(names), what)}: {listed(names)}" for what, names in groups.items() if names]
    metadata_before, metadata_after = dict(first_model.metadata_props), dict(second_model.metadata_props)
    keys = {**metadata_before, **metadata_after}
    changed = sorted(key for key in keys if metadata_before.get(key) != metadata_after.get(key))
    remarks += [f"metadata: {', '.join(changed)}"] if changed else []
    if first_model.producer_version != second_model.producer_version:
        remarks.append(f"written by quark {first_model.producer_version}, now {second_model.producer_version}")
    return remarks


def _tensors(model: ir.Model) -> dict[str, tuple[Any, ...]]:
    """The type, shape and a hash of the values of every initializer."""
    tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
    return {
        name: (tensor.dtype, tensor.shape, hashlib.sha256(tensor.tobytes()).digest())
        for name, tensor in tensors.items()
        if tensor is not None
    }
