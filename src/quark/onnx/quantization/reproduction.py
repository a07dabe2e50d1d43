"""Making a quantized file again from its card, and whether the same bytes come out.

    read the card -> find the float model and the data -> compare their hashes with the card's -> quantize -> compare

The hashes are compared before the work. The file that comes out is given the card of the one that it should be, since
other versions or another processor are said beforehand and make no other model by themselves: the same bytes then mean
that everything else is the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quark.account import FileFacts
from quark.card import Card, DataKind, differences, platform_facts
from quark.errors import InvalidValueError, ModelError, UnsupportedOptionError
from quark.files.foreign import check_folder, short
from quark.files.output import scratch_folder
from quark.onnx.data import Preprocessing
from quark.onnx.load import load
from quark.onnx.pack import pack_message
from quark.onnx.quantization.card_file import FoundCard, read_card
from quark.onnx.quantization.config.config import QConfig, QuantizationConfig
from quark.onnx.quantization.config.files import naming
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.data import Data
from quark.onnx.quantization.file_differences import external_files, file_differences, file_hash
from quark.onnx.quantization.making import card_of, data_facts, placed, put_card
from quark.onnx.quantization.pipeline import Outcome, quantize_graph
from quark.onnx.quantization.quantizer import files_read
from quark.onnx.quantization.settings import Settings
from quark.onnx.save import SaveOptions, check_output, together, write_model, write_text
from quark.onnx.session import release_memory

MOST_ENTRIES = 200_000  # of a folder that a card names


@dataclass(frozen=True)
class Reproduction:
    """`expected` is the hash of the file that the card is about. `warnings` tell what is not as it was then, and
    `differences` what became of it; both are empty in the best case."""

    expected: str
    found: FileFacts
    warnings: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        return self.expected == self.found.sha256

    def to_dict(self) -> dict[str, Any]:
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
    """Make the file of a card again, and compare. Without `model` and `data` they are looked for where the card says,
    and beside it. Another model or other data than the card's are an error, before the work. The result is kept where
    `output` says, with the card beside it, and otherwise not."""
    found = read_card(Path(card))
    _check(found)
    expected, warnings = _expected(found)
    settings = naming(f"card '{found.file}'", settings_from, found.card)
    source = _find_source(found, None if model is None else Path(model))
    samples = _find_data(found, None if data is None else Path(data))
    warnings += _compare_inputs(found.card, source, samples, settings)
    reads = (source, found.file, found.model, samples.source, *files_read(settings))
    target = None if output is None else check_output(output, *reads)
    outcome = quantize_graph(source, samples, settings)
    if outcome.digest.hexdigest() != found.card.source.sha256:
        raise ModelError(f"model '{source}' changed after it was compared with the card: start again")
    options = _save_options(found, settings)
    made, differing = _compared(outcome, found, expected, options)
    if target is not None:
        # another file than the card's says itself how it was made
        own = found.card if made.sha256 == expected else replace(outcome.card, packing=found.card.packing)
        with together(target):
            beside = placed(own, target, source, samples.source, _write(outcome, own, target, options))
            outcome.check_unchanged()
            write_text(json.dumps({"card": beside.to_dict()}, indent=1), target.with_suffix(".json"))
    return Reproduction(expected, made, tuple(warnings), tuple(differing))


def _check(found: FoundCard) -> None:
    if found.card.functions:
        raise UnsupportedOptionError(
            f"card '{found.file}': {', '.join(found.card.functions)} was a Python function, which a card cannot hold; "
            f"run the script that made the file again"
        )


def _expected(found: FoundCard) -> tuple[str, list[str]]:
    """The hash of the file that there should be: of the model itself where that was given, else as the card says, with
    a warning where the model beside it is another one by now."""
    result = found.card.result
    if found.model is None:
        if result is None:
            raise InvalidValueError(f"card '{found.file}' says no hash of its file, and that is not beside it")
        return result.sha256, []
    now = file_hash(found.model)
    if found.file == found.model or result is None or result.sha256 == now:
        return now, []
    warning = f"'{found.model.name}' beside the card has changed since: SHA-256 {now[:16]}"
    return result.sha256, [warning + _old_hash(found.card, bool(external_files(found.model)))]


def _old_hash(card: Card, has_external_data: bool) -> str:
    """What to add to a message about different hashes if they may not be comparable; mostly empty."""
    if not has_external_data or not card.versions.get("quark", "").startswith("1.0."):
        return ""
    return (
        "; if the card is from the release 1.0.0, the hashes cannot be compared: quark 1.0 hashed external data in "
        "another way"
    )


def settings_from(card: Card) -> Settings:
    """The settings that the card's config means. Nothing is written but the result: folders that keep ranges, layers
    or plans are left out, which a card could name to write where it likes."""
    _refuse_functions(card.config, "config")
    kind = QConfig if "global_config" in card.config else QuantizationConfig
    settings = replace(settings_of(kind.from_dict(dict(card.config))), name=card.config_name)
    finetune, mix = settings.refine.finetune, settings.mix
    if finetune is not None:
        settings = replace(settings, refine=replace(settings.refine, finetune=replace(finetune, folder=None)))
    if mix is not None and not mix.is_plan_given:
        settings = replace(settings, mix=replace(mix, plan_file=None))
    return replace(settings, calibrate=replace(settings.calibrate, cache=None))


def _refuse_functions(content: Any, where: str) -> None:
    """Raise an error if a config names a Python function as its measure: to load it would run somebody else's code."""
    if isinstance(content, Mapping):
        for name, value in content.items():
            if name == "Metric" and isinstance(value, str) and ":" in value.partition("?")[0]:
                raise UnsupportedOptionError(
                    f"card: field '{where}.{name}' is {short(value)}, a Python function, which is not run from a card; "
                    "run the script that made the file again"
                )
            _refuse_functions(value, f"{where}.{name}")


def _find_source(found: FoundCard, given: Path | None) -> Path:
    """The float model: as given, where the card says, or a file beside the card with the same size and content."""
    card, folder = found.card, found.file.parent
    if given is not None:
        return given
    recorded = folder / card.paths["source"] if "source" in card.paths else None
    if recorded is not None and recorded.is_file():
        return recorded
    named = folder / card.source.name
    if card.source.name and named.is_file():
        return named
    for path in sorted(folder.glob("*.onnx")):
        is_alike = path != found.model and path.stat().st_size == card.source.bytes
        if is_alike and file_hash(path) == card.source.sha256:
            return path
    raise InvalidValueError(
        f"card '{found.file}': its float model {card.source.name or f'of {card.source.bytes} bytes'} was not found; "
        f"give it with --model"
    )


def _find_data(found: FoundCard, given: Path | None) -> Data:
    facts = found.card.data
    fields = facts.preprocessing
    try:
        preprocessing = Preprocessing(**fields)
    except (TypeError, InvalidValueError) as error:
        raise InvalidValueError(f"card '{found.file}': field 'data.preprocessing': {error}") from error
    if facts.kind in (DataKind.RANDOM, DataKind.UNUSED):
        return Data(None, facts.count, facts.batch_size, preprocessing, is_random=True)
    folder = found.file.parent
    names = ["", ""] if facts.kind is DataKind.OBJECT else [found.card.paths.get("data", ""), facts.name]
    # the path ends in the name of the data, so that a card cannot lead to whatever lies above it
    named = [folder / name for name in names if name and name.rpartition("/")[2] == (facts.name or name)]
    path = next((each for each in ([given] if given is not None else named) if each.exists()), None)
    if path is not None and given is None and path.is_dir():
        check_folder(path, f"card '{found.file}': its calibration data '{path}', to be given by --calib,", MOST_ENTRIES)
    if path is None:
        what = f"'{facts.name}'" if facts.name else f"{facts.samples} samples of a {facts.kind.value}"
        missing = f"'{given}': there is no such file or folder" if given else f"{what} was not found; give --calib"
        raise InvalidValueError(f"card '{found.file}': its calibration data {missing}")
    return Data(path, facts.count, facts.batch_size, preprocessing)


def _compare_inputs(card: Card, source: Path, data: Data, settings: Settings) -> list[str]:
    """An error where the model or the data is another one; else what else is not as it was."""
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
    found = differences(card, replace(now, data=card.data, packing=card.packing, platform=platform_facts()))
    del loaded, samples
    release_memory()
    return found


def _compared(outcome: Outcome, found: FoundCard, expected: str, options: SaveOptions) -> tuple[FileFacts, list[str]]:
    """The file, and what differs in it. It is written under the name that it had: weights in a file of their own are
    called after it, which the model says."""
    known = found.card.result.name if found.card.result is not None else ""
    name = found.model.name if found.model is not None else known or "model.onnx"
    with scratch_folder() as folder:
        path = folder / name
        made = _write(outcome, found.card, path, options)
        outcome.check_unchanged()
        if expected in (made.sha256, file_hash(path)):
            return replace(made, sha256=expected), []
        if found.model is None:
            differing = ["the file itself is not at hand: what differs in it is unknown"]
        else:
            differing = file_differences(found.model, path) or ["other bytes for the same nodes, weights and metadata"]
        if outcome.card.plan_sha256 != found.card.plan_sha256:
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


def _save_options(found: FoundCard, settings: Settings) -> SaveOptions:
    """As configured; but `quark pack`, afterwards, writes one file where that is possible."""
    is_one = bool(found.card.packing) and found.model is not None and not external_files(found.model)
    return SaveOptions() if is_one else settings.save
