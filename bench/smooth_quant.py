"""The gain of SmoothQuant: signal-to-noise ratio of 8-bit transformers with it and without it.

    python -m bench.smooth_quant [--presets NAME ...] [--alphas 0.5 auto] [--op-types MatMul Gemm ... | all]
                                 [--model NAME=PATH] [--data FILE.npz] [--samples 64] [--length 32]

Without `--model`, two encoders are generated. As in trained encoders, their norms make a few channels much larger than
the others, and the weights of these channels are small. In `pre-norm`, only layers read the norms, so the division is
folded into them; in `post-norm`, the residual path reads them as well. Weights and token ids are random, with a fixed
seed.

`--model` is any network that takes token ids, such as an exported sentence encoder. Its int64 inputs get random ids
with a fixed seed, ones if the name contains "mask", and zeros if it contains "type". `--data` gives real inputs
instead: one array [n, ...] per input, with the rows for calibration first.

The error is measured over all float outputs, on as many samples as were used for calibration, excluding masked
positions. By default only products are quantized, as is usual for transformers: with the sums of a residual path in 8
bits, their error would dominate.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from bench.cells import number
from bench.models import positive
from bench.record import Record, add_record_arguments, say
from quark.compare import FidelityMeter
from quark.errors import QuarkError
from quark.onnx import get_default_config, quantize
from quark.onnx.session import open_session

PRESETS = ["A8W8", "U8S8_AAWS"]
OP_TYPES = ["MatMul", "Gemm"]
HEADER = ["model", "preset", "alpha", "layers smoothed", "by a Mul", "SQNR dB", "gain dB"]
WIDTH, HEADS, HIDDEN, VOCABULARY, BLOCKS, SEED = 128, 4, 512, 1000, 4, 0
OUTLIERS, LOUDNESS = 4, 30.0  # channels that the norms make louder, and by how much

Array = np.ndarray[Any, Any]
Feed = dict[str, Array]


class Encoder:
    """A transformer that grows node by node; every method gives the name of a tensor."""

    def __init__(self, length: int, is_post_norm: bool) -> None:
        self.length = length
        self.is_post_norm = is_post_norm
        self.random = np.random.default_rng(SEED)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        loud = self.random.choice(WIDTH, OUTLIERS, replace=False)
        self.gains = self.random.lognormal(0, 0.3, WIDTH)
        self.gains[loud] *= self.random.uniform(0.5, 1.5, OUTLIERS) * LOUDNESS

    def model(self) -> onnx.ModelProto:
        x = self.node("Gather", self.constant(self.random.standard_normal((VOCABULARY, WIDTH))), "ids")
        x = self.node("Add", x, self.constant(0.1 * self.random.standard_normal((self.length, WIDTH))))
        x = self.norm(x, 1.0) if self.is_post_norm else x
        for _ in range(BLOCKS):
            x = self.around(x, self.attention)
            x = self.around(x, self.feed_forward)
        self.nodes.append(helper.make_node("Identity", [self.norm(x, 1.0)], ["y"], name="last"))
        ids = helper.make_tensor_value_info("ids", TensorProto.INT64, [1, self.length])
        y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, self.length, WIDTH])
        graph = helper.make_graph(self.nodes, "encoder", [ids], [y], self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)

    def node(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        name = f"{op_type.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [f"{name}_out"], name=name, **attributes))
        return f"{name}_out"

    def constant(self, array: Any) -> str:
        name = f"c{len(self.constants)}"
        array = np.asarray(array)
        array = array if array.dtype == np.int64 else array.astype(np.float32)
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def norm(self, x: str, strength: float) -> str:
        gains, offsets = self.gains**strength, 0.1 * self.random.standard_normal(WIDTH) * self.gains**strength
        return self.node("LayerNormalization", x, self.constant(gains), self.constant(offsets), axis=-1)

    def linear(self, x: str, sizes: tuple[int, int], *, is_behind_norm: bool) -> str:
        weight = self.random.standard_normal(sizes) / np.sqrt(sizes[0])
        weight = weight / self.gains[:, None] ** 0.8 if is_behind_norm else weight
        bias = 0.05 * self.random.standard_normal(sizes[1])
        return self.node("Add", self.node("MatMul", x, self.constant(weight)), self.constant(bias))

    def around(self, x: str, part: Any) -> str:
        """The part on a residual path, with a norm before it or behind."""
        if self.is_post_norm:
            return self.norm(self.node("Add", x, part(x)), 1.0)
        return self.node("Add", x, part(self.norm(x, 1.0)))

    def heads(self, x: str, order: list[int]) -> str:
        shape = self.constant(np.array([0, 0, HEADS, WIDTH // HEADS]))
        return self.node("Transpose", self.node("Reshape", x, shape), perm=order)

    def attention(self, x: str) -> str:
        q, k, v = (self.linear(x, (WIDTH, WIDTH), is_behind_norm=True) for _ in range(3))
        scores = self.node("MatMul", self.heads(q, [0, 2, 1, 3]), self.heads(k, [0, 2, 3, 1]))
        scaled = self.node("Mul", scores, self.constant((WIDTH // HEADS) ** -0.5))
        mixed = self.node("MatMul", self.node("Softmax", scaled, axis=-1), self.heads(v, [0, 2, 1, 3]))
        joined = self.node("Transpose", mixed, perm=[0, 2, 1, 3])
        joined = self.node("Reshape", joined, self.constant(np.array([0, 0, WIDTH])))
        return self.linear(joined, (WIDTH, WIDTH), is_behind_norm=False)

    def feed_forward(self, x: str) -> str:
        hidden = self.node("Gelu", self.linear(x, (WIDTH, HIDDEN), is_behind_norm=True))
        return self.linear(hidden, (HIDDEN, WIDTH), is_behind_norm=False)


@dataclass(frozen=True)
class Figure:
    """One row of the table; `alpha` is empty without smoothing."""

    model: str
    preset: str
    alpha: str
    layers: int
    muls: int
    sqnr_db: float
    gain_db: float | None

    def cells(self) -> list[str]:
        smoothed = [str(self.layers), str(self.muls)] if self.alpha else ["", ""]
        return [self.model, self.preset, self.alpha or "none", *smoothed, number(self.sqnr_db), number(self.gain_db)]


@dataclass(frozen=True)
class Network:
    name: str
    model: onnx.ModelProto | Path
    calibration: list[Feed]
    test: list[Feed]
    expected: list[list[Array]]

    @classmethod
    def of(cls, name: str, model: onnx.ModelProto | Path, feeds: list[Feed]) -> Network:
        half = len(feeds) // 2
        return cls(name, model, feeds[:half], feeds[half:], outputs_of(model, feeds[half:]))

    def figure(self, preset: str, alpha: str, op_types: Sequence[str], before: float | None) -> Figure:
        config = get_default_config(preset)
        config.print_summary = False
        config.op_types_to_quantize = list(op_types)
        if alpha:
            config.include_sq = True
            config.extra_options["SmoothAlpha"] = alpha if alpha == "auto" else float(alpha)
        result = quantize(self.model, self.calibration, config)
        changed = [text for facts in result.report.algorithms if facts.name == "SmoothQuant" for text in facts.changed]
        sqnr = sqnr_of(self.test, self.expected, outputs_of(result.model, self.test))
        gain = None if before is None else sqnr - before
        return Figure(
            self.name, preset, alpha, len(changed), sum("Mul inserted" in each for each in changed), sqnr, gain
        )


def outputs_of(model: onnx.ModelProto | Path, feeds: Sequence[Feed]) -> list[list[Array]]:
    session = open_session(model)
    return [session.run(None, feed) for feed in feeds]


def sqnr_of(feeds: Sequence[Feed], expected: Sequence[Sequence[Array]], actual: Sequence[Sequence[Array]]) -> float:
    """Over all outputs that are float, at the places that count."""
    meter = FidelityMeter("all")
    for feed, one, other in zip(feeds, expected, actual, strict=True):
        masks = [array != 0 for name, array in feed.items() if "mask" in name]
        for y, z in zip(one, other, strict=True):
            if np.issubdtype(y.dtype, np.floating):
                counts = next((mask for mask in masks if mask.shape == y.shape[: mask.ndim]), ...)
                meter.add(y[counts], z[counts])
    return meter.result().sqnr_db


def seeded_feeds(model: onnx.ModelProto | Path, count: int, length: int) -> list[Feed]:
    """Token ids, masks and types for the inputs of a network; a dimension that is left open gets `length`, the first
    one 1."""
    random = np.random.default_rng(SEED + 1)
    feeds: list[Feed] = [{} for _ in range(count)]
    for port in open_session(model).get_inputs():
        if port.type != "tensor(int64)":
            raise SystemExit(f"--model: input '{port.name}' is {port.type}: give its values with --data FILE.npz")
        open_sizes = [1] + [length] * (len(port.shape) - 1)
        shape = [size if isinstance(size, int) else spare for size, spare in zip(port.shape, open_sizes, strict=True)]
        for feed in feeds:
            if "mask" in port.name:
                feed[port.name] = np.ones(shape, np.int64)
            else:
                feed[port.name] = random.integers(0, VOCABULARY, shape) * ("type" not in port.name)
    return feeds


def given_feeds(path: Path, count: int) -> list[Feed]:
    """Rows of the file's arrays, each as a batch of one."""
    try:
        with np.load(path) as file:
            arrays = dict(file)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--data {path}: {error}; expected an .npz file with an array for each input") from error
    rows = min((len(array) for array in arrays.values()), default=0)
    if rows < count:
        raise SystemExit(f"--data {path} has {rows} rows, and {count} are needed: change --samples")
    return [{name: array[i : i + 1] for name, array in arrays.items()} for i in range(count)]


def networks(arguments: argparse.Namespace) -> list[Network]:
    count = 2 * arguments.samples
    if arguments.model is None:
        if arguments.data is not None:
            raise SystemExit("--data belongs to a model: name that with --model NAME=PATH")
        found = {name: Encoder(arguments.length, name == "post-norm").model() for name in ("pre-norm", "post-norm")}
        return [Network.of(name, model, seeded_feeds(model, count, arguments.length)) for name, model in found.items()]
    name, equals, path = arguments.model.partition("=")
    if not equals or not Path(path).is_file():
        raise SystemExit(f"--model {arguments.model}: expected NAME=PATH of an ONNX file")
    has_data = arguments.data is not None
    feeds = given_feeds(arguments.data, count) if has_data else seeded_feeds(Path(path), count, arguments.length)
    return [Network.of(name, Path(path), feeds)]


def measure(network: Network, arguments: argparse.Namespace) -> Iterator[Figure]:
    op_types = [] if arguments.op_types == ["all"] else arguments.op_types
    for preset in arguments.presets:
        before: float | None = None
        for alpha in ("", *arguments.alphas):
            say(f"{network.name}, {preset}, alpha {alpha or 'none'}")
            figure = network.figure(preset, alpha, op_types, before)
            before = figure.sqnr_db if before is None else before
            yield figure


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=PRESETS, metavar="NAME")
    parser.add_argument("--alphas", nargs="+", default=["0.5", "auto"], metavar="ALPHA", help="numbers, or auto")
    parser.add_argument(
        "--op-types", nargs="+", default=OP_TYPES, metavar="TYPE", help="to quantize; all: the preset's"
    )
    parser.add_argument("--model", metavar="NAME=PATH", help="a network of token ids, instead of those built here")
    parser.add_argument("--data", type=Path, metavar="FILE.npz", help="its inputs")
    parser.add_argument(
        "--samples", type=positive, default=64, help="to calibrate on, and as many to test (%(default)s)"
    )
    parser.add_argument("--length", type=positive, default=32, help="of a sequence (%(default)s)")
    add_record_arguments(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    record = Record.begin("smooth_quant", arguments, HEADER, [f"{arguments.samples} samples to calibrate on."])
    try:
        for network in networks(arguments):
            for figure in measure(network, arguments):
                record.add([figure.cells()], figure)
    except QuarkError as error:
        raise SystemExit(str(error)) from error
    record.finish()


if __name__ == "__main__":
    main()
