"""What every preset makes of the same networks, as digests: a change that should not change files is held against them.

    python tests/support/same_bytes.py --record [--models DIR]     write what is made now to tests/data/same_bytes.json
    python tests/support/same_bytes.py --check [--models DIR]      compare, and list what differs

The digest is of the graph and its weights; versions and how the file was made do not count. Last bits of a sum depend
on the processor and on the packages, so digests are kept for each of these surroundings, and only the same ones are
compared. `--models` names a folder with mobilenet_v2.onnx, of which ten presets are made too.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

RECORD = Path(__file__).parents[1] / "data" / "same_bytes.json"
FEW = ("XINT8", "A8W8", "A16W8", "INT8_CNN_DEFAULT", "INT16_CNN_DEFAULT", "BF16", "BFP16", "MXINT8", "MXFP4E2M1", "MX6")
SEED = 0


def surroundings() -> str:
    """What the last bits of a file depend on, other than the code."""
    from quark.formats.native import instruction_set

    names = ("numpy", "onnx", "onnxruntime", "torch")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in names]
    return ", ".join([platform.machine(), instruction_set() or "none", _processor(), *versions])


def _processor() -> str:
    """What matrix products are chosen by: the maker of the processor, and its instructions."""
    try:
        facts = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    maker = facts.partition("vendor_id")[2].partition("\n")[0].strip("\t :")
    flags = set(facts.partition("flags")[2].partition("\n")[0].split())
    known = {"avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8"}
    return f"{maker} " + "+".join(sorted(flags & known))


def digest_of(model: onnx.ModelProto) -> str:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.metadata_props[:]
    copy.producer_version = ""
    return hashlib.sha256(copy.SerializeToString(deterministic=True)).hexdigest()[:16]


def is_finetuned(preset: str) -> bool:
    return preset.endswith(("_ADAROUND", "_ADAQUANT", "_ACCURATE", "_DISTILL"))


# What presets do not turn on: a preset, extra options, and fields.
OPTIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "following biases": ("XINT8", {"BiasCorrectionInputs": "quantized"}, {}),
    "equalization by channel": ("A8W8", {"CLEClip": "per_channel", "CLEBiasAbsorption": True}, {"include_cle": True}),
}


def demo_digest(preset: str, options: Mapping[str, Any] | None = None, fields: Mapping[str, Any] | None = None) -> str:
    from quark.demo import network_path
    from quark.onnx import get_default_config, quantize

    samples = np.random.default_rng(SEED).random((12, 1, 8, 8), dtype=np.float32)
    config = get_default_config(preset)
    if is_finetuned(preset):  # as few steps as show that the order of everything is the same
        config.extra_options.setdefault("FastFinetune", {}).update({"NumIterations": 10, "BatchSize": 2})
    config.extra_options.update(options or {})
    for name, value in (fields or {}).items():
        setattr(config, name, value)
    return digest_of(quantize(network_path(), samples, config).model)


def large_digest(preset: str, model: Path) -> str:
    from quark.onnx import quantize

    samples = np.random.default_rng(SEED).standard_normal((4, 3, 224, 224), dtype=np.float32)
    return digest_of(quantize(model, [sample[None] for sample in samples], preset).model)


def torch_digest(case: str) -> str:
    import torch
    from torch_networks import images, trained

    from quark.torch import ModelQuantizer
    from quark.torch.export import write_onnx
    from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
    from quark.torch.quantization.config.type import Dtype, QSchemeType
    from quark.torch.quantization.observer.observer import PerTensorPowOf2MinMSEObserver

    kind, _, name = case.partition(" ")
    powers = QuantizationSpec(Dtype.int8, PerTensorPowOf2MinMSEObserver, symmetric=True)
    unsigned = QuantizationSpec(Dtype.uint8, symmetric=False)
    channels = QuantizationSpec(Dtype.int8, qscheme=QSchemeType.per_channel, ch_axis=0, symmetric=True)
    configs = {
        "powers of two": QuantizationConfig(powers, powers, powers, powers),
        "int8": QuantizationConfig(*[QuantizationSpec(Dtype.int8, symmetric=True)] * 3),
        "uint8 by channels": QuantizationConfig(unsigned, unsigned, channels),
        "fp4": QuantizationConfig(QuantizationSpec(Dtype.fp4), weight=QuantizationSpec(Dtype.fp4)),
    }
    batch = images(4)
    quantizer = ModelQuantizer(Config(configs[name]))
    frozen = quantizer.freeze(quantizer.quantize_model(trained(kind, SEED), [batch]))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "out.onnx"
        write_onnx(frozen, batch, path, check=False)
        return digest_of(onnx.load(path))


TORCH = ("resnet powers of two", "mobilenet uint8 by channels", "vit int8", "unet powers of two", "resnet fp4")


def cases(models: Path | None = None) -> Iterator[tuple[str, Callable[[], str]]]:
    """All cases by name, with what makes the digest."""
    import torch

    from quark.onnx.quantization.presets import PRESETS

    torch.set_num_threads(1)  # sums in another order have other last bits

    for preset in PRESETS:
        if preset.endswith("_DISTILL"):  # tests/features/distillation runs one twice
            continue
        yield f"demo {preset}", partial(demo_digest, preset)
    for name, case in OPTIONS.items():
        yield f"demo with {name}", partial(demo_digest, *case)
    for network in TORCH:
        yield f"torch {network}", partial(torch_digest, network)
    if models is not None and (models / "mobilenet_v2.onnx").is_file():
        for preset in FEW:
            yield f"mobilenet_v2 {preset}", partial(large_digest, preset, models / "mobilenet_v2.onnx")


def recorded() -> dict[str, str]:
    """The digests for these surroundings; empty if there are none."""
    content = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    return content.get(surroundings(), {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--models", type=Path)
    arguments = parser.parse_args()
    known, made, differing = recorded(), {}, []
    for name, make in cases(arguments.models):
        start = time.perf_counter()
        made[name] = make()
        is_same = known.get(name) in (None, made[name])
        differing += [] if is_same else [name]
        print(f"{time.perf_counter() - start:6.1f} s  {name}{'' if is_same else '  DIFFERS'}", flush=True)
    if arguments.record:
        content = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
        content[surroundings()] = {**known, **made}
        RECORD.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    elif differing:
        raise SystemExit(f"{len(differing)} of {len(made)} differ: {', '.join(differing)}")
    elif not known:
        raise SystemExit(f"nothing is recorded for {surroundings()}")


if __name__ == "__main__":
    main()
