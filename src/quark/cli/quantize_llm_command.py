"""`quark quantize-llm`: quantize a causal language model of Hugging Face, and measure its perplexity."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quark.cli.errors import ErrorReportingCommand
from quark.cli.options import COUNT, PATH, json_option
from quark.cli.terminal import say, say_json
from quark.errors import MissingDependencyError

if TYPE_CHECKING:
    from quark.torch.language.folders import LanguageQuantization, Perplexity

DTYPES = ("float32", "bfloat16", "float16")


@click.command("quantize-llm", cls=ErrorReportingCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=PATH)
@click.argument("out", type=PATH, required=False)
@click.option("--scheme", default="int4_wo_64", show_default=True, metavar="NAME", help="Types; see --list-schemes.")
@click.option(
    "--algorithm",
    "algorithms",
    multiple=True,
    metavar="gptq|awq|...",
    help="How accuracy is kept: gptq, gptaq, awq, qronos, autoround, svdquant, smoothquant, autosmoothquant, rotation. "
    "Can be given more than once. All but rotation need --calib. Default: weights are rounded to nearest.",
)
@click.option("--calib", type=PATH, metavar="TEXT", help="A text file for calibration, read by the folder's tokenizer.")
@click.option("--samples", type=COUNT, default=128, show_default=True, help="Pieces of the text for calibration.")
@click.option("--length", type=COUNT, default=512, show_default=True, help="Tokens of a piece.")
@click.option(
    "--exclude",
    multiple=True,
    metavar="PATTERN",
    help="Leave layers with such names in float, such as lm_head. Default: as for the model's type, usually lm_head.",
)
@click.option("--kv-cache", metavar="fp8|int8", help="Also quantize the keys and values that attention keeps.")
@click.option(
    "--layout",
    type=click.Choice(["compressed-tensors", "quark", "onnx"]),
    default="compressed-tensors",
    show_default=True,
    help="Safetensors in one of two published layouts, or ONNX.",
)
@click.option("--onnx-cache", "has_cache", is_flag=True, help="The ONNX file takes and returns keys and values.")
@click.option("--evaluate", type=PATH, metavar="TEXT", help="Measure the perplexity of this text, before and after.")
@click.option("--limit", type=COUNT, metavar="N", help="Evaluate on N evenly spaced pieces of --length tokens.")
@click.option("--device", default="cpu", show_default=True, metavar="cpu|cuda")
@click.option("--dtype", type=click.Choice(DTYPES), help="Compute in this type (default: that of the folder).")
@click.option("--list-schemes", is_flag=True, help="List the schemes, and quantize nothing.")
@json_option()
def quantize_llm(folder: Path, out: Path | None, list_schemes: bool, as_json: bool, **options: Any) -> None:
    """Quantize the language model in FOLDER into OUT.

    FOLDER has config.json, safetensors and, for texts, a tokenizer, as Hugging Face saves them. Layers are quantized
    one after the other. Nothing is downloaded, and no code of the folder is run.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "quantize-llm needs torch, which is not installed: pip install torch safetensors transformers"
        ) from error
    from quark.torch.language.folders import quantize_folder
    from quark.torch.quantization.config.template import SCHEMES

    if list_schemes:
        width = max(map(len, SCHEMES))
        for name, scheme in SCHEMES.items():
            say(f"{name:{width}}  {scheme.text}")
        return
    if out is None:
        raise click.UsageError("missing argument OUT, the folder to write to")

    if find_spec("transformers") is not None:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # type: ignore[no-untyped-call] # there is one of our own

    def tell(perplexity: Perplexity) -> None:
        if not as_json:
            say(f"{perplexity.name}: perplexity {perplexity.value:.4f}")

    result = quantize_folder(_request(folder, out, options), tell)
    if as_json:
        say_json(
            {
                "path": str(result.path),
                "perplexity": {perplexity.name: perplexity.value for perplexity in result.perplexities},
            }
        )
    else:
        say(f"written: {result.path}")


def _request(folder: Path, out: Path, options: dict[str, Any]) -> LanguageQuantization:
    import torch

    from quark.torch.language.folders import LanguageQuantization, Layout
    from quark.torch.language.texts import Text

    calib, evaluate, length = options["calib"], options["evaluate"], options["length"]
    if options["limit"] is not None and evaluate is None:
        raise click.UsageError("--limit needs --evaluate")
    if options["device"] != "cpu" and not torch.cuda.is_available():
        raise click.UsageError(f"--device {options['device']}: torch finds no such device; use cpu")
    return LanguageQuantization(
        folder,
        out,
        options["scheme"],
        options["algorithms"],
        None if calib is None else Text(calib, options["samples"], length),
        options["exclude"] or None,
        options["kv_cache"],
        Layout(options["layout"]),
        None if evaluate is None else Text(evaluate, options["limit"], length),
        options["device"],
        None if options["dtype"] is None else getattr(torch, options["dtype"]),
        options["has_cache"],
    )
