"""How a quantized file came about, as far as it and the report beside it say: what the page shows under "making".

    command          makes the file again: `quark reproduce`, where there is a card
    report_command   makes the page again
    config           the whole configuration; `config_changes` where it differs from its preset, or from the nearest one
    calibration, seeds, versions, hashes, algorithms
    notes            what is not known, and why

A file from elsewhere says none of it. The JSON beside the model counts where its hash is that of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.account import FileFacts
from quark.cli.calibration_option import DEFAULT_PREPROCESS, Calibration
from quark.errors import InvalidValueError, QuarkError
from quark.files.foreign import REPORT, parse_json, read_json
from quark.text import shell_command

if TYPE_CHECKING:
    from quark.cli.report_facts import LabelledData

CARD = "card"
METADATA = "quark."
MOST_CHANGES = 20  # beyond them no preset is near


def making_of(
    model: Path, facts: FileFacts, float_model: Path, calibration: Calibration, data: LabelledData | None = None
) -> dict[str, Any]:
    """All that is known about the making of `model`, which has these `facts`."""
    metadata = _metadata(model)
    beside, notes = _report_beside(model, facts)
    card = beside.get(CARD) or _json_of(metadata.get(f"{METADATA}{CARD}", ""))
    card = card if isinstance(card, Mapping) else {}
    config = beside.get("config") or card.get("config") or _json_of(metadata.get(f"{METADATA}config", ""))
    name = str(beside.get("config_name") or metadata.get(f"{METADATA}config_name", ""))
    if not card:
        notes.append(
            "There is no reproducibility card in the file or beside it, so no command makes it again for sure."
        )
    made = {
        "command": _reproduce_command(model, beside, card),
        "report_command": _report_command(model, float_model, calibration, data),
        "made_by": _made_by(card),
        "config_name": name,
        **_configuration(name, config),
        "calibration": beside.get("calibration") or card.get("data"),
        "seeds": card.get("seeds"),
        "versions": beside.get("versions") or card.get("versions") or _version(metadata),
        "platform": card.get("platform"),
        "packing": card.get("packing") or metadata.get(f"{METADATA}packing"),
        "hashes": {
            key.removeprefix(METADATA).removesuffix("_sha256"): value
            for key, value in metadata.items()
            if key.startswith(METADATA) and key.endswith("_sha256")
        },
        "algorithms": [_algorithm_line(each) for each in _list(beside.get("algorithms")) if isinstance(each, Mapping)],
        "rewrites": [f"{each.get('count')} {each.get('name')}" for each in _list(beside.get("rewrites"))],
        "notes": notes,
    }
    return {key: value for key, value in made.items() if value or key == "config_changes"}


def _metadata(model: Path) -> dict[str, str]:
    from quark.onnx.load.outline import read_proto

    return {each.key: each.value for each in read_proto(model).metadata_props}


def _report_beside(model: Path, facts: FileFacts) -> tuple[Mapping[str, Any], list[str]]:
    """The report of the run that wrote the model, and a note where there is one that is not of this model."""
    path = model.with_suffix(".json")
    if not path.is_file():
        return {}, []
    try:
        content = read_json(path, path.name, REPORT)
    except InvalidValueError as error:
        return {}, [f"'{path.name}' beside the model is not the report of this file: {error}"]
    result = content.get("result") if isinstance(content, Mapping) else None
    if isinstance(content, Mapping) and isinstance(result, Mapping) and result.get("sha256") == facts.sha256:
        return content, []
    return {}, [f"'{path.name}' beside the model is not the report of this file: another hash, or none."]


def _json_of(text: str) -> Any:
    """An entry of the model's metadata as JSON; None where it is none. It may come from anybody."""
    try:
        return parse_json(text, "metadata") if text else None
    except InvalidValueError:
        return None


def _list(value: Any) -> list[Any]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _reproduce_command(model: Path, beside: Mapping[str, Any], card: Mapping[str, Any]) -> str:
    if not card:
        return ""
    name = model.with_suffix(".json").name if beside.get(CARD) else model.name
    return shell_command(["quark", "reproduce", Path(name)])


def _made_by(card: Mapping[str, Any]) -> str:
    """The command that made the file. It is put together again: what a card says may have been written by anybody."""
    from quark.card import Card
    from quark.onnx.quantization.making import command_of

    try:
        return command_of(Card.from_dict(card)) if card.get("command") else ""
    except QuarkError:
        return ""  # a card that cannot be read says nothing else either


def _report_command(model: Path, float_model: Path, calibration: Calibration, data: LabelledData | None) -> str:
    """By names alone: where files lie is nobody else's business, and the page does not hang on it."""
    parts: list[str | Path] = ["quark", "report", Path(model.name), "--float", Path(float_model.name)]
    if calibration.path is not None:
        parts += ["--calib", calibration.path.resolve().name]
    if calibration.is_random:
        parts += ["--random"]
    if calibration.count is not None:
        parts += ["--num-calib", str(calibration.count)]
    if data is not None:
        parts += ["--data", data.path.resolve().name]
        parts += [] if data.limit is None else ["--limit", str(data.limit)]
        parts += [] if data.labels is None else ["--labels", data.labels.name]
    if calibration.preprocess != DEFAULT_PREPROCESS:
        parts += ["--preprocess", Path(calibration.preprocess).name]
    return shell_command(parts)


def _configuration(name: str, config: Any) -> dict[str, Any]:
    """The configuration, and where it differs from the preset of that name; else from the one that is nearest."""
    if not isinstance(config, Mapping):
        return {}
    from quark.onnx.quantization.config.files import plain
    from quark.onnx.quantization.presets import PRESETS

    here = dict(_flat(config))
    candidates = [name] if name in PRESETS else list(PRESETS)
    found = {each: _changes(dict(_flat(plain(vars(PRESETS[each].config()), "", str))), here) for each in candidates}
    nearest = min(found, key=lambda each: len(found[each]))
    if len(found[nearest]) > MOST_CHANGES:
        return {"config": dict(config)}
    same = {} if nearest == name else {"nearest_preset": nearest}
    return {"config": dict(config), "config_changes": found[nearest], **same}


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _changes(preset: Mapping[str, Any], here: Mapping[str, Any]) -> list[dict[str, Any]]:
    keys = sorted(key for key in {*preset, *here} if preset.get(key) != here.get(key))
    return [{"option": key, "preset": preset.get(key), "here": here.get(key)} for key in keys]


def _algorithm_line(facts: Mapping[str, Any]) -> str:
    changed = facts.get("changed")
    count = len(changed) if isinstance(changed, list) else 0
    return f"{facts.get('name')}: {count or 'no'} change{'' if count == 1 else 's'}"


def _version(metadata: Mapping[str, str]) -> dict[str, str]:
    version = metadata.get(f"{METADATA}version")
    return {"quark": version} if version else {}
