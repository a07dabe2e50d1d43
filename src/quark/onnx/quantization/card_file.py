"""Where cards are read from: a quantized model, or the JSON beside it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

from quark.card import CARD_KEY, Card
from quark.errors import InvalidValueError
from quark.files.foreign import REPORT, Fields, open_regular, parse_json, read_json
from quark.onnx.pack.record import KEY as PACKED_KEY


@dataclass(frozen=True)
class FoundCard:
    """A card, the file that it was read from, and the quantized model that it is about where that is at hand."""

    card: Card
    file: Path
    model: Path | None


def read_card(path: Path) -> FoundCard:
    """The card of MODEL.json, or of MODEL.onnx; where both lie side by side and belong together, MODEL.json's, which
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
    import onnx
    from google.protobuf.message import DecodeError

    try:
        with open_regular(path, f"card '{path}'") as file:
            proto = onnx.load_model_from_string(file.read())
        said = {str(each.key): str(each.value) for each in proto.metadata_props}
    except (DecodeError, OSError, ValueError) as error:  # ValueError: text that is none
        raise InvalidValueError(f"card '{path}' cannot be read as an ONNX model: {error}") from error
    if CARD_KEY not in said:
        raise InvalidValueError(
            f"model '{path}' has no card: its metadata has no '{CARD_KEY}'; quark writes one since there are cards"
        )
    card = Card.from_json(said[CARD_KEY], f"model '{path}', card")
    if PACKED_KEY not in said:
        return card
    label = f"model '{path}', metadata '{PACKED_KEY}'"
    return replace(card, packing=Fields(parse_json(said[PACKED_KEY], label), label).text("profile"))
