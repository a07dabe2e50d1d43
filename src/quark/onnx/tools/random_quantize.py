"""Quantize a model without calibration data: ranges come from random numbers.

Good for measuring speed and for trying whether a model can be deployed. Its accuracy means nothing.
"""

from __future__ import annotations

import re
from argparse import Namespace

from quark.errors import InvalidValueError
from quark.onnx import Config, ModelQuantizer, PowerOfTwoMethod, get_default_config
from quark.onnx.tools.command import EXTERNAL_DATA, Argument, Tool


def parse_subgraphs_list(exclude_subgraphs: str) -> list[tuple[list[str], list[str]]]:
    """The first and the last nodes of subgraphs that are written as '[a, b], [c]; [d], [e]'."""
    result = []
    for part in exclude_subgraphs.split(";"):
        lists = [[name.strip() for name in names.split(",")] for names in re.findall(r"\[(.*?)\]", part)]
        if len(lists) != 2 or not all(name for names in lists for name in names):
            raise InvalidValueError(
                f"exclude_subgraphs '{part.strip()}': expected the first and the last nodes of each subgraph, such as "
                "'[a, b], [c]; [d], [e]'"
            )
        result.append((lists[0], lists[1]))
    return result


def main(args: Namespace) -> None:
    """Quantize the file `args.input_model_path` to `args.quantized_model_path`."""
    config = get_default_config(args.config)
    config.extra_options |= {"UseRandomData": True, "Protect": "none"}  # nothing to measure accuracy by
    config.use_external_data_format = args.save_as_external_data
    if args.config == "XINT8":  # the scale of least error is meaningless for random numbers
        config.calibrate_method = PowerOfTwoMethod.NonOverflow
    if args.exclude_nodes:
        config.nodes_to_exclude = [name.strip() for name in args.exclude_nodes.split(";")]
    if args.exclude_subgraphs:
        config.subgraphs_to_exclude = parse_subgraphs_list(args.exclude_subgraphs)
    quantizer = ModelQuantizer(Config(global_quant_config=config))
    quantizer.quantize_model(args.input_model_path, args.quantized_model_path, None)


TOOL = Tool(
    "Quantize a float model without calibration data, to measure its speed.",
    Argument("--input_model_path", "the float model"),
    Argument("--quantized_model_path", "the model to write"),
    Argument("--config", "the preset; see `quark presets`", default="XINT8"),
    Argument("--exclude_nodes", "nodes to leave in float, such as 'conv1;conv2'", default=""),
    Argument("--exclude_subgraphs", "first and last nodes of subgraphs, such as '[a, b], [c]; [d], [e]'", default=""),
    EXTERNAL_DATA,
    work=main,
)
parse_args = TOOL.parse_args

if __name__ == "__main__":
    TOOL.run()
