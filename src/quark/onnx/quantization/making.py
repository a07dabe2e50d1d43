"""The card of a run: gathered from the settings, the data and the plan, and read again from a model or its JSON."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import yaml
from google.protobuf.message import DecodeError

from quark.account import FileFacts
from quark.card import (
    CARD_KEY,
    Card,
    DataFacts,
    DataKind,
    TorchFacts,
    platform_facts,
    relative_path,
    samples_digest,
)
from quark.errors import InvalidValueError
from quark.features.mixed_precision.options import ScoreKind
from quark.files.foreign import REPORT, Fields, open_regular, parse_json, read_json
from quark.measures import FunctionMeasure
from quark.onnx.data import Preprocessing, Samples
from quark.onnx.load import LoadedModel
from quark.onnx.pack.editing import KEY as PACKED_KEY
from quark.onnx.quantization.config.config import QuantizationConfig
from quark.onnx.quantization.config.content import plain
from quark.onnx.quantization.data import Data
from quark.onnx.quantization.presets import PRESETS
from quark.onnx.settings import Settings
from quark.onnx.versions import versions
from quark.text import shell_command

CONFIG_FILE = "config.yaml"  # in commands, for a config that is not a preset with changes
_MOST_CHANGES = 12  # beyond them a file is easier to read

Change = tuple[str, Any]


def data_facts(data: Data, samples: Samples, settings: Settings) -> DataFacts:
    """The facts about the samples. Call it before any is dropped: the hash covers all that were read."""
    if not samples.count:
        return DataFacts(DataKind.UNUSED, seed=settings.calibrate.seed)
    source = None if settings.calibrate.has_random_data else data.source
    path = source_path(source)
    if path is None:
        kind = DataKind.RANDOM if source is None else DataKind.OBJECT
    else:
        kind = DataKind.FOLDER if path.is_dir() else DataKind.FILE
    return DataFacts(
        kind=kind,
        name=path.resolve().name if path is not None else "" if source is None else type(source).__name__,
        count=data.count,
        batch_size=data.batch_size,
        preprocessing={} if samples.images is None else samples.images.preprocessing.to_dict(),
        samples=samples.count,
        held_out=len(samples.held_out),
        sha256=samples_digest(samples, samples.held_out),
        seed=settings.calibrate.seed,
    )


def source_path(source: Any) -> Path | None:
    """The path of data or of a model; None if it is an object in memory."""
    return Path(source) if isinstance(source, (str, os.PathLike)) else None


def card_of(settings: Settings, loaded: LoadedModel, data: DataFacts, plan_sha256: str) -> Card:
    """The card, except for the file that is still to be written. Waits for the hash of a large source."""
    finetune = settings.refine.finetune
    seeds = {"data": settings.calibrate.seed} if data.kind is DataKind.RANDOM else {}
    used = versions()
    if finetune is not None:
        seeds["finetuning"] = finetune.fit.seed
        used["torch"] = importlib.metadata.version("torch")
    mix = settings.mix
    functions = ["EvaluateFunction"] if mix is not None and mix.evaluate is not None else []
    functions += ["Metric"] if mix is not None and isinstance(mix.measure, FunctionMeasure) else []
    if mix is not None and mix.score is not None and mix.score.function is not None:
        functions.append("MetricDistanceFn" if mix.score.kind is ScoreKind.DISTANCE else "MetricEvaluateFn")
    return Card(
        source=FileFacts(loaded.name, loaded.bytes, loaded.sha256),
        config_name=settings.name,
        config=settings.config,
        data=data,
        versions=used,
        plan_sha256=plan_sha256,
        seeds=seeds,
        functions=tuple(functions),
    )


def put_card(proto: onnx.ModelProto, card: Card) -> None:
    """Store the card in the model's metadata, in place of an earlier one."""
    text = card.inside().to_json()
    for prop in proto.metadata_props:
        if prop.key == CARD_KEY:
            prop.value = text
            return
    proto.metadata_props.add(key=CARD_KEY, value=text)


def placed(card: Card, target: Path, source: Any, data: Any, result: FileFacts | None) -> Card:
    """The card for the JSON beside the model, with what belongs to this run. `source` and `data` are as the user gave
    them; relative paths are kept of those that are files or folders."""
    folder = target.parent
    given = {"source": source_path(source), "data": source_path(data)}
    ways = {name: relative_path(path, folder) for name, path in given.items() if path is not None}
    paths = {name: way for name, way in ways.items() if way is not None}
    here = replace(card, platform=platform_facts(), paths=paths, result=result)
    return replace(here, command=command_of(here))


def command_of(card: Card) -> str:
    """Return the command that makes the file, with names instead of paths. A config that cannot be written as a preset
    with a few changes appears as a file name; `quark reproduce` does not need that file. For an export of a torch
    module it is the command that makes the file again."""
    if card.torch is not None:
        return _torch_command(card, card.torch)
    parts: list[str | Path] = ["quark", "quantize", Path(card.source.name or "MODEL.onnx"), "OUT.onnx"]
    known = preset_and_changes(card.config)
    if known is None:
        parts += ["--config", CONFIG_FILE]
    else:
        parts += ["--config", known[0], *set_arguments(known[1])]
    options = card.config.get("extra_options")
    is_asked_for = isinstance(options, Mapping) and bool(options.get("UseRandomData"))
    data = card.data
    if data.kind is DataKind.RANDOM and not is_asked_for:
        parts.append("--random")
    elif data.kind in (DataKind.FOLDER, DataKind.FILE, DataKind.OBJECT):
        parts += ["--calib", data.name if data.name and data.kind is not DataKind.OBJECT else "CALIB"]
        parts += [] if data.count is None else ["--num-calib", str(data.count)]
        parts += [] if data.batch_size == 1 else ["--batch-size", str(data.batch_size)]
        if data.preprocessing:
            name = Preprocessing(**data.preprocessing).name
            parts += ["--preprocess", "preprocessing.yaml" if name == "custom" else name]
    return shell_command([*parts, *(["--pack", card.packing] if card.packing else [])])


def _torch_command(card: Card, facts: TorchFacts) -> str:
    if not facts.request:
        beside = Path(card.result.name).with_suffix(".json") if card.result is not None else "CARD.json"
        state = ["--state", "STATE.pt"] if facts.is_trained else []
        return shell_command(["quark", "reproduce", beside, "--module", "FILE.py:FUNCTION", *state])
    parts: list[str | Path] = ["quark", "quantize-torch"]
    for name, value in facts.request.items():
        parts += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return shell_command([*parts, "--pretrained", card.source.name, "--data_dir", card.data.name or "DATA"])


def packed_report(text: str, profile: str, result: FileFacts) -> str:
    """The report on a file, MODEL.json, after that was packed: with its new hash and how it is packed."""
    content = parse_json(text, "report", REPORT)
    content["result"] = asdict(result)
    if content.get("card"):
        card = replace(Card.from_dict(content["card"]), packing=profile, result=result)
        content["card"] = replace(card, command=command_of(card)).to_dict()
    return json.dumps(content, indent=1, allow_nan=False)


def set_arguments(changes: tuple[Change, ...]) -> list[str]:
    """Changes as arguments of --set: values in YAML, on one line."""
    arguments = []
    for key, value in changes:
        text = yaml.safe_dump(value, default_flow_style=True, width=1 << 20).strip().removesuffix("...").strip()
        arguments += ["--set", f"{key}={text}"]
    return arguments


def preset_and_changes(config: Mapping[str, Any]) -> tuple[str, tuple[Change, ...]] | None:
    """The preset nearest to a config, and the changes from it to the config, as --set takes them. None for a QConfig, a
    config without an option that every near preset has, or one with many changes."""
    options = config.get("extra_options")
    if not isinstance(options, Mapping):
        return None
    # Few presets have to be compared. One with an option that the config lacks is out, since --set removes nothing; any
    # other needs at least as many changes as it lacks options, so the closest come first.
    candidates = sorted(
        (len(options) - len(preset.options), number, preset)
        for number, preset in enumerate(PRESETS.values())
        if preset.options.keys() <= options.keys()
    )
    usual = QuantizationConfig().to_dict()
    best: tuple[int, int, str, tuple[Change, ...]] | None = None
    for least, number, preset in candidates:
        if least > _MOST_CHANGES or (best is not None and (least, number) > best[:2]):
            break
        base = {**usual, **plain(preset.fields), "extra_options": plain(preset.options)}
        changes = _changes(base, config)
        if changes is not None and len(changes) <= _MOST_CHANGES:
            candidate = (len(changes), number, preset.name, changes)
            best = candidate if best is None or candidate[:2] < best[:2] else best
    return None if best is None else best[2:]


def _changes(base: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[Change, ...] | None:
    """None if the base has something more: --set adds and replaces, and removes nothing."""
    if set(base) != set(wanted):
        return None
    changes: list[Change] = [
        (key, wanted[key]) for key in wanted if key != "extra_options" and wanted[key] != base[key]
    ]
    return _parts(changes, base.get("extra_options"), wanted.get("extra_options"), "")


def _parts(changes: list[Change], base: Any, wanted: Any, prefix: str) -> tuple[Change, ...] | None:
    if not isinstance(base, Mapping) or not isinstance(wanted, Mapping) or set(base) - set(wanted):
        return None
    for key, value in wanted.items():
        if key in base and isinstance(base[key], Mapping) and isinstance(value, Mapping):
            if _parts(changes, base[key], value, f"{prefix}{key}.") is None:
                return None
        elif key not in base or value != base[key]:
            changes.append((f"{prefix}{key}", value))
    return tuple(changes)


# ---------------------------------------------------------------- reading cards
@dataclass(frozen=True)
class FoundCard:
    """A card, the file that it was read from, and the quantized model that it is about, if that is there."""

    card: Card
    file: Path
    model: Path | None


def read_card(path: Path) -> FoundCard:
    """The card of MODEL.json or of MODEL.onnx. If both lie side by side and belong together it is MODEL.json's, which
    says more."""
    if path.is_dir():
        raise InvalidValueError(f"card '{path}' is a folder; expected a quantized model or its JSON")
    if not path.exists():
        raise InvalidValueError(f"card '{path}': there is no such file; expected a quantized model or its JSON")
    if path.suffix.lower() == ".json":
        card = _card_of_json(path)
        model = path.with_name(card.result.name) if card.result is not None and card.result.name else None
        return FoundCard(card, path, model if model is not None and model.is_file() else None)
    card = _card_of_model(path)
    beside = path.with_suffix(".json")
    with contextlib.suppress(InvalidValueError):
        fuller = _card_of_json(beside) if beside.is_file() else None
        if fuller is not None and fuller.inside() == card.inside():
            return FoundCard(replace(fuller, packing=card.packing), path, path)
    return FoundCard(card, path, path)


def _card_of_json(path: Path) -> Card:
    label = f"card '{path}'"
    content = read_json(path, label, REPORT)
    return Card.from_dict(content["card"] if isinstance(content, dict) and "card" in content else content, label)


def _card_of_model(path: Path) -> Card:
    try:
        with open_regular(path, f"card '{path}'") as file:
            proto = onnx.load_model_from_string(file.read())
        said = {str(prop.key): str(prop.value) for prop in proto.metadata_props}
    except (DecodeError, OSError, ValueError) as error:  # ValueError: text that is not Unicode
        raise InvalidValueError(f"card '{path}' cannot be read as an ONNX model: {error}") from error
    if CARD_KEY not in said:
        raise InvalidValueError(
            f"model '{path}' has no card: its metadata has no '{CARD_KEY}', which quark writes into what it quantizes"
        )
    card = Card.from_json(said[CARD_KEY], f"model '{path}', card")
    if PACKED_KEY not in said:
        return card
    label = f"model '{path}', metadata '{PACKED_KEY}'"
    return replace(card, packing=Fields(parse_json(said[PACKED_KEY], label), label).text("profile"))
