"""Draw how the weights of a model are distributed."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from quark.onnx.convert.distributions import draw_weights
from quark.onnx.tools.command import Argument, Tool, read_model
from quark.report.console import Console

DEFAULT_FOLDER = "weights_hist"


def sanitize_filename(name: str) -> str:
    """The name of a tensor as part of the name of a file: slashes, dots and colons become underscores."""
    return name.replace("/", "_").replace(".", "_").replace(":", "_")


def main(model_path: str, output_dir: str | None, perchannel: bool = False) -> None:
    """Write a histogram of every initializer to the folder, by default weights_hist; with `perchannel`, the range of
    every channel."""
    folder = Path(output_dir or DEFAULT_FOLDER)
    count = draw_weights(read_model(model_path), folder, is_per_channel=perchannel)
    Console().say(f"{model_path} -> {folder} ({count} pictures)")


def save(args: Namespace) -> None:
    """Draw the weights of the file `args.input_model` to the folder `args.output`."""
    main(args.input_model, args.output, args.perchannel)


TOOL = Tool(
    "Draw a histogram of every weight, or the range of every channel, as PNG files.",
    Argument("--input_model", "the model"),
    Argument("--output", f"the folder to write to (default: {DEFAULT_FOLDER})", default=None),
    Argument("--perchannel", "Draw the lowest and highest value of each channel instead.", action="store_true"),
    work=save,
)

if __name__ == "__main__":
    TOOL.run()
