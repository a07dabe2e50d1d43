"""The networks that a benchmark is asked for, and the errors for those that are not there."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from bench.models import KNOWN, add_arguments, chosen_models, parse_model


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--calib", "images", *given])


@pytest.mark.parametrize(
    ("text", "path", "preprocessing"),
    [
        ("n=a/b.onnx", "a/b.onnx", "imagenet"),
        ("n=a/b.onnx:lite", "a/b.onnx", "lite"),
        ("n=a/b.onnx:mine.yaml", "a/b.onnx", "mine.yaml"),
        ("n=C:\\nets\\b.onnx", "C:\\nets\\b.onnx", "imagenet"),
        ("n=C:\\nets\\b.onnx:none", "C:\\nets\\b.onnx", "none"),
        ("n=a=b.onnx", "a=b.onnx", "imagenet"),
    ],
)
def test_what_follows_the_last_colon_is_the_preprocessing(text: str, path: str, preprocessing: str) -> None:
    model = parse_model(text)
    assert (model.name, model.path, model.preprocessing) == ("n", Path(path), preprocessing)


@pytest.mark.parametrize("text", ["b.onnx", "=b.onnx", "n=", "n=b.onnx:lit"])
def test_what_names_no_model_is_refused(text: str) -> None:
    with pytest.raises(SystemExit, match="--model"):
        parse_model(text)


def test_the_folder_gives_the_networks_that_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "efficientnet_lite0.onnx").touch()
    (chosen,) = chosen_models(arguments("--models", str(tmp_path), "--only", "efficientnet_lite0"))
    assert (chosen.path.parent, chosen.preprocessing) == (tmp_path, "lite")


def test_a_missing_network_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"{next(iter(KNOWN))}.onnx.*--only.*--model"):
        chosen_models(arguments("--models", str(tmp_path)))
    with pytest.raises(SystemExit, match="--models DIR.*--model NAME=PATH"):
        chosen_models(arguments())


def test_an_unknown_preset_is_found_before_the_work() -> None:
    with pytest.raises(SystemExit, match="MXINT9.*MXINT8"):
        chosen_models(arguments("--presets", "MXINT9"))
