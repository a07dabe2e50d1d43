"""Transformers by their task measures, and a language model by its perplexity: float, ours, and other quantizers.

    python -m bench.transformers --zoo DIR --judge FILE.py bench/cifar_judge.py [--only NAME ...]
                                 [--language DIR --calibration FILE.npy --evaluation FILE.npy
                                  [--device cuda] [--jobs N]]
                                 [--rows PATTERN ...] [--peers NAME ... | none] [--judge-python PYTHON] [--resume]

Networks in ONNX are judged as by `bench.networks`: `--zoo` has the float models and what the scripts of `--judge` read.
`bench/train_vit.py` trains the vision transformer that bench/cifar_judge.py judges.
`--language` is a folder that transformers reads as a causal language model; the two files have token ids [windows,
tokens], from different texts. Its last projection stays in float. Perplexity is over all tokens but the first of each
window. AMD Quark gets the same configuration objects, in its own environment. SmoothQuant's alpha is searched, and
rotations are in blocks of 32 and happen at inference. With `--jobs` several rows are measured at once, and their
seconds mean little.

Weights in 4 bits are in MatMulNBits, in groups that have a scale and a zero point each; of our presets, only
INT4_WEIGHT_ONLY_GPTQ has zero points. Ours has the table of embeddings in 4 bits as well, ONNX Runtime where the row
says so. `--rows` are patterns for what is measured: the quantizer, a space, the configuration.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from bench.child import OURS, ChildError, Interpreters
from bench.models import positive
from bench.networks import (
    CHOOSING,
    PRODUCTS_ONLY,
    Bench,
    Configuration,
    Figure,
    Judge,
    add_network_arguments,
    static_onnxruntime,
    table,
)
from bench.networks import HEADER as NETWORKS_HEADER
from bench.peers import add_peer_arguments, open_peers
from bench.record import Record, say
from bench.side_by_side import FLOAT

AMD = "amd-quark"
UNUSED = "/ unprotected"
HEADER = [each for each in NETWORKS_HEADER if each != UNUSED]
GROUP = 32


def _nbits(algorithm: str, **others: Any) -> dict[str, Any]:
    common = {"GroupSize": GROUP, "Symmetric": False, "Bits": 4, "AccuracyLevel": 1, "Algorithm": algorithm}
    return {"MatMulNBitsParams": {**common, **others}}


def _onnxruntime_nbits(title: str, config: str, **arguments: Any) -> Configuration:
    settings = {"method": "weight_only", "config": config, "arguments": arguments}
    return Configuration("onnxruntime", title, settings=settings, is_static=False)


IN_GROUPS = f"4 bits in groups of {GROUP}"
PRESETS = ("INT8_TRANSFORMER_DEFAULT", "A8W8", "UINT8_DYNAMIC_QUANT", "MXINT8", "MXFP4E2M1", "MATMUL_NBITS")
OWN_PRESETS = ("INT4_WEIGHT_ONLY", "INT4_WEIGHT_ONLY_GPTQ", "INT4_WEIGHT_ONLY_AWQ")
CONFIGURATIONS = (
    *(Configuration(OURS, preset, preset) for preset in (*PRESETS, *OWN_PRESETS)),
    *(
        Configuration(OURS, f"{IN_GROUPS}, {algorithm}", "INT4_WEIGHT_ONLY", _nbits(algorithm, EmbeddingBits=4))
        for algorithm in ("RTN", "GPTQ", "HQQ")
    ),
    Configuration(OURS, "MXFP4E2M1, GPTQ", "MXFP4E2M1", {"UseGPTQ": True}),
    Configuration(
        OURS,
        "MXFP4E2M1, GPTQ, rotation in blocks",
        "MXFP4E2M1",
        {"UseGPTQ": True, "RotationSize": 32, "OnlineR1Rotation": True},
        {"include_rotation": True},
    ),
    *(
        Configuration(
            OURS, f"MXFP4E2M1, GPTQ, {title}", "MXFP4E2M1", {"UseGPTQ": True, "MatMulConstBOnly": True, **options}
        )
        for title, options in (
            ("attention in float", {}),
            ("attention in float, first and last layer in MXFP8", {"KeepFirstLast": "mxfp8_e4m3"}),
        )
    ),
    *(Configuration(AMD, preset, preset) for preset in PRESETS),
    *(
        Configuration(AMD, f"{IN_GROUPS}, {algorithm}", "MATMUL_NBITS", _nbits(algorithm))
        for algorithm in ("RTN", "GPTQ", "HQQ")
    ),
    static_onnxruntime("U8S8 MinMax", "QUInt8", "MinMax"),
    static_onnxruntime("U8S8 MinMax, products only", "QUInt8", "MinMax", **PRODUCTS_ONLY),
    *(
        Configuration(
            "onnxruntime",
            f"dynamic {title}",
            settings={"weight": weight, "method": "dynamic", "per_channel": True},
            is_static=False,
        )
        for title, weight in (("U8", "QUInt8"), ("S8", "QInt8"))
    ),
    _onnxruntime_nbits(f"{IN_GROUPS}, RTN", "DefaultWeightOnlyQuantConfig", block_size=GROUP, is_symmetric=False),
    _onnxruntime_nbits(
        f"{IN_GROUPS}, RTN, embedding",
        "DefaultWeightOnlyQuantConfig",
        block_size=GROUP,
        is_symmetric=False,
        op_types_to_quantize=["MatMul", "Gather"],
    ),
    _onnxruntime_nbits(f"{IN_GROUPS}, HQQ", "HQQWeightOnlyQuantConfig", block_size=GROUP, bits=4),
    Configuration("nncf", "mixed, transformer", settings={"preset": "mixed", "model_type": "transformer"}),
)

Description = tuple[str, Mapping[str, Any]]  # a class of quark.torch's configurations, and its arguments


@dataclass(frozen=True)
class LanguageConfiguration:
    """How the linear layers of a language model are quantized, in the words that both packages understand."""

    label: str
    layer: Mapping[str, Description]
    algorithms: Sequence[Description] = ()


LAYERS, LAYER = "model.layers", "model.layers.layer_id"
_QKV = [f"self_attn.{each}_proj" for each in "qkv"]
_UP = ["mlp.up_proj", "mlp.gate_proj"]
_READERS = [
    {"prev_op": "input_layernorm", "layers": _QKV, "inp": _QKV[0], "module2inspect": "self_attn"},
    {"prev_op": "post_attention_layernorm", "layers": _UP, "inp": _UP[0], "module2inspect": "mlp"},
]


def _rotated(before: str) -> list[dict[str, Any]]:
    """Both norms of a layer whose residual input is computed by that module."""
    norms = [(before, "input_layernorm", _QKV), (f"{LAYER}.self_attn.o_proj", "post_attention_layernorm", _UP)]
    return [
        {"prev_modules": [source], "norm_module": f"{LAYER}.{norm}", "next_modules": [f"{LAYER}.{each}" for each in to]}
        for source, norm, to in norms
    ]


# what AMD Quark has to be told of a Llama; ours finds it
STRUCTURE: Mapping[str, Mapping[str, Any]] = {
    "GPTQConfig": {
        "model_decoder_layers": LAYERS,
        "inside_layer_modules": [*_QKV, "self_attn.o_proj", *_UP, "mlp.down_proj"],
    },
    "AWQConfig": {
        "model_decoder_layers": LAYERS,
        "scaling_layers": [*_READERS, {"prev_op": "mlp.up_proj", "layers": ["mlp.down_proj"], "inp": "mlp.down_proj"}],
    },
    "AutoSmoothQuantConfig": {"model_decoder_layers": LAYERS, "scaling_layers": _READERS},
    "RotationConfig": {
        "scaling_layers": {
            "first_layer": _rotated("model.embed_tokens"),
            "middle_layers": _rotated("model.layers.pre_layer_id.mlp.down_proj"),
            "last_layer": [
                {
                    "prev_modules": [f"{LAYER}.mlp.down_proj"],
                    "norm_module": "model.norm",
                    "next_modules": ["lm_head"],
                }
            ],
        }
    },
}
GPTQ: Description = ("GPTQConfig", {})
AWQ: Description = ("AWQConfig", {})
SMOOTH: Description = ("AutoSmoothQuantConfig", {})
# not folded: folding moves the scales of normalizations into weights, and these scales hold outliers down
ROTATION: Description = ("RotationConfig", {"r1": True, "rotation_size": 32, "online_r1_rotation": True})
INT4_GROUPS: Mapping[str, Description] = {"weight": ("Int4PerGroupSpec", {"ch_axis": -1, "group_size": 64})}
INT4_CHANNELS: Mapping[str, Description] = {"weight": ("Int4PerChannelSpec", {"ch_axis": 0})}
MXFP4_WEIGHT: Mapping[str, Description] = {"weight": ("OCP_MXFP4Spec", {"ch_axis": -1, "is_dynamic": False})}
MXFP4 = {**MXFP4_WEIGHT, "input_tensors": ("OCP_MXFP4Spec", {"ch_axis": -1, "is_dynamic": True})}


INT8_WEIGHT: Mapping[str, Description] = {"weight": ("Int8PerChannelSpec", {"ch_axis": 0, "symmetric": True})}
PER_TOKEN: Description = ("Int8PerChannelSpec", {"ch_axis": 1, "symmetric": True, "is_dynamic": True})
W8A8 = {**INT8_WEIGHT, "input_tensors": ("Int8PerTensorSpec", {"is_dynamic": False})}
W8A8_PER_TOKEN = {**INT8_WEIGHT, "input_tensors": PER_TOKEN}
LANGUAGE_CONFIGURATIONS = (
    LanguageConfiguration("4 bits in groups of 64, RTN", INT4_GROUPS),
    LanguageConfiguration("4 bits in groups of 64, GPTQ", INT4_GROUPS, [GPTQ]),
    LanguageConfiguration("4 bits in groups of 64, AWQ", INT4_GROUPS, [AWQ]),
    LanguageConfiguration("4 bits per channel, RTN", INT4_CHANNELS),
    LanguageConfiguration("4 bits per channel, GPTQ", INT4_CHANNELS, [GPTQ]),
    LanguageConfiguration("MXFP4 weights, RTN", MXFP4_WEIGHT),
    LanguageConfiguration("MXFP4 weights, GPTQ", MXFP4_WEIGHT, [GPTQ]),
    LanguageConfiguration("W8A8, static", W8A8),
    LanguageConfiguration("W8A8, static, SmoothQuant", W8A8, [SMOOTH]),
    LanguageConfiguration("W8A8, a scale per token", W8A8_PER_TOKEN),
    LanguageConfiguration("W8A8, a scale per token, SmoothQuant", W8A8_PER_TOKEN, [SMOOTH]),
    LanguageConfiguration("MXFP4 weights and activations", MXFP4),
    LanguageConfiguration("MXFP4 weights and activations, rotation in blocks", MXFP4, [ROTATION]),
    LanguageConfiguration("MXFP4 weights and activations, rotation in blocks, GPTQ", MXFP4, [ROTATION, GPTQ]),
)
LANGUAGE_QUANTIZERS = (OURS, AMD)


@dataclass(frozen=True)
class LanguageModel:
    """A folder for transformers, with token windows to calibrate on and others to evaluate."""

    folder: Path
    calibration: Path
    evaluation: Path
    samples: int
    windows: int
    device: str

    @classmethod
    def open(cls, arguments: argparse.Namespace) -> LanguageModel:
        """What is wrong with the arguments ends the program."""
        folder: Path = arguments.language
        if not (folder / "config.json").is_file():
            raise SystemExit(f"--language {folder}: no config.json there; give a folder that transformers can load")
        files = {name: getattr(arguments, name) for name in ("calibration", "evaluation")}
        for name, path in files.items():
            if path is None or not path.is_file():
                raise SystemExit(f"--{name} {path}: no such file; expected an .npy file of token ids [windows, tokens]")
        numbers = {"samples": arguments.language_samples, "windows": arguments.windows}
        return cls(folder, **files, **numbers, device=arguments.device)

    def measure(self, who: str, configuration: LanguageConfiguration | None, interpreters: Interpreters) -> Figure:
        """One row; None is the float model."""
        label = "" if configuration is None else configuration.label
        figure = Figure(self.folder.name, "language", who, label, True, self.samples)
        job = {
            "who": who,
            "model": str(self.folder.absolute()),
            "calibration": str(self.calibration.absolute()),
            "evaluation": str(self.evaluation.absolute()),
            "samples": self.samples,
            "windows": self.windows,
            "device": self.device,
        }
        if configuration is not None:
            job |= {"layer": configuration.layer, "exclude": ["lm_head"]}
            job["algorithms"] = [
                (name, {**(STRUCTURE[name] if who == AMD else {}), **arguments})
                for name, arguments in configuration.algorithms
            ]
        try:
            found = interpreters.run(OURS if who == FLOAT else who, "one_language.py", job)
        except ChildError as error:
            figure.errors["quantize"] = str(error)
        else:
            figure.measures, figure.file_mb = {"perplexity": found["perplexity"]}, found.get("file_mb")
            if "save_error" in found:
                figure.errors["save"] = found["save_error"]
            if who != FLOAT:
                figure.seconds, figure.peak_mb = found["seconds"], found["peak_mb"]
        say(f"{figure.network} {who} {label}: {figure.measures or figure.errors}")
        return figure


def is_chosen(quantizer: str, configuration: str, patterns: Sequence[str] | None) -> bool:
    """True if a pattern of `--rows` matches, or none was given.

    >>> is_chosen("ours", "4 bits per channel, GPTQ", ["ours *GPTQ", "nncf *"])
    True
    """
    return not patterns or any(fnmatch(f"{quantizer} {configuration}".strip(), pattern) for pattern in patterns)


def update(record: Record, figures: Sequence[Figure]) -> None:
    """Make the record show these figures, and write it."""
    unused = NETWORKS_HEADER.index(UNUSED)
    record.rows = [[*row[:unused], *row[unused + 1 :]] for row in table(figures)]
    record.figures = [asdict(figure) for figure in figures]
    record.blanks = [blank for figure in figures for blank in figure.blanks()]
    record.write()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--language", type=Path, metavar="DIR", help="a causal language model, for transformers")
    parser.add_argument("--calibration", type=Path, metavar="FILE.npy", help="token ids for the language model")
    parser.add_argument("--evaluation", type=Path, metavar="FILE.npy", help="other token ids, for its perplexity")
    parser.add_argument(
        "--language-samples", type=positive, default=128, metavar="N", help="windows to calibrate on (%(default)s)"
    )
    parser.add_argument("--windows", type=positive, default=40, metavar="N", help="windows to evaluate (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="for the language model (%(default)s)")
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="rows of the language model at once")
    parser.add_argument("--rows", nargs="+", metavar="PATTERN", help="such as 'ours *' (all)")
    parser.add_argument("--note", default="", metavar="TEXT", help="a remark for the record, such as what else ran")
    add_peer_arguments(parser, (AMD, "onnxruntime", "nncf"))
    add_network_arguments(parser, is_required=False)
    arguments = parser.parse_args()
    if arguments.zoo is None and arguments.language is None:
        raise SystemExit("nothing to measure: give --zoo DIR with --judge FILE.py, or --language DIR")
    if arguments.zoo is not None and arguments.judge is None:
        raise SystemExit("--zoo: give the scripts that judge its networks with --judge FILE.py")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    patterns = arguments.rows
    judge = None if arguments.zoo is None else Judge.open(arguments)
    language = None if arguments.language is None else LanguageModel.open(arguments)
    interpreters = open_peers(arguments).with_timeout(arguments.timeout)
    notes = [arguments.note] if arguments.note else []
    record = Record.begin("transformers", arguments, HEADER, notes, interpreters.facts)
    figures: list[Figure] = []
    if arguments.resume and (before := record.earlier((*CHOOSING, "rows", "note"))) is not None:
        figures = [Figure.from_json(figure) for figure in before.figures]
        record.peers = {**before.peers, **record.peers}
    done = {figure.key for figure in figures}
    quantizers = interpreters.quantizers

    def choose(_kind: str) -> list[Configuration]:
        own = [configuration for configuration in CONFIGURATIONS if configuration.quantizer in quantizers]
        return [each for each in own if is_chosen(each.quantizer, each.label, patterns)]

    for name in judge.networks if judge else ():
        assert judge is not None
        with tempfile.TemporaryDirectory(prefix="quark-bench-") as folder:
            bench = Bench(judge, judge.model(name), interpreters, arguments, Path(folder), choose)
            figures += bench.figures(done)
        update(record, figures)
    if language is not None:
        rows = [
            (FLOAT, None),
            *((who, configuration) for configuration in LANGUAGE_CONFIGURATIONS for who in LANGUAGE_QUANTIZERS),
        ]
        asked = [
            (who, row, interpreters)
            for who, row in rows
            if (who == FLOAT or (who in quantizers and is_chosen(who, row.label if row else "", patterns)))
            and (language.folder.name, who, row.label if row else "") not in done
        ]
        measured: dict[int, Figure] = {}
        with ThreadPoolExecutor(arguments.jobs) as pool:  # each row runs in a process of its own
            places = {pool.submit(language.measure, *row): place for place, row in enumerate(asked)}
            for each in as_completed(places):
                measured[places[each]] = each.result()
                update(record, [*figures, *(measured[place] for place in sorted(measured))])
    record.finish()


if __name__ == "__main__":
    main()
