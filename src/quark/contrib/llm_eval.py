"""The evaluation that AMD's script for language models ends with: the perplexity of wikitext-2."""

from __future__ import annotations

import argparse
import csv
import os
from pathlib import Path

import torch
from torch import nn

from quark.errors import MissingDependencyError, UnsupportedOptionError
from quark.report.console import Console
from quark.torch.language.texts import perplexity, pieces
from quark.torch.utils.llm import get_tokenizer

_LENGTH = 2048
_OTHERS = ("tasks", "use_ppl_eval_for_kv_cache", "use_mlperf_rouge")


def eval_model(
    args: argparse.Namespace,
    model: nn.Module,
    main_device: str | torch.device,
    save_metrics_to_csv: bool = False,
    output_dir: str | os.PathLike[str] = "metrics_output_dir",
    multimodal: bool = False,
) -> None:
    """Say the perplexity of wikitext-2's test split in pieces of 2048 tokens. Of `args`, `model_dir` and
    `num_eval_data` are used, and what asks for another evaluation is refused."""
    for name in _OTHERS:
        if getattr(args, name, None):
            raise UnsupportedOptionError(f"{name}: the perplexity is what is evaluated here; leave it out")
    if multimodal:
        raise UnsupportedOptionError("multimodal: texts are what is evaluated here; use --skip_evaluation")
    try:
        from datasets import load_dataset  # noqa: PLC0415 - heavy, and optional
    except ImportError as error:
        raise MissingDependencyError("datasets is not installed: pip install datasets") from error
    count = getattr(args, "num_eval_data", -1)
    lines = load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="test")["text"]
    text = "\n\n".join(lines if count == -1 else lines[:count])
    ids = get_tokenizer(args.model_dir)(text, verbose=False)["input_ids"]
    found = perplexity(model, pieces(torch.tensor(ids), _LENGTH))
    Console().say(f"[INFO] Perplexity: {found:.4f}")
    if save_metrics_to_csv:
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "metrics.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("metric", "value"), ("perplexity", f"{found:.6f}")])
