"""Models, tokenizers and calibration data of Hugging Face, as scripts for AMD Quark ask for them.

>>> from quark.torch.utils.llm import get_calib_dataloader, get_model, get_tokenizer
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from quark.errors import InvalidValueError, MissingDependencyError, ModelError, UnsupportedOptionError, unknown_name
from quark.files.foreign import read_text
from quark.text import get_logger
from quark.torch.language.architecture import is_language_model
from quark.torch.language.texts import pieces

_LOG = get_logger(__name__)
_DTYPES = {"auto": None, "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
# name: dataset, configuration, split, column
_DATASETS: dict[str, tuple[str, str | None, str, str]] = {
    "pileval": ("mit-han-lab/pile-val-backup", None, "validation", "text"),
    "cnn_dailymail": ("abisee/cnn_dailymail", "3.0.0", "train", "article"),
    "wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1", "train", "text"),
}
_DATASETS |= {
    "pileval_for_awq_benchmark": _DATASETS["pileval"],
    "wikitext_for_gptq_benchmark": _DATASETS["wikitext"],
    "abisee/cnn_dailymail": _DATASETS["cnn_dailymail"],
    "Salesforce/wikitext": _DATASETS["wikitext"],
}
_MOST_BYTES = 1 << 30


def get_model(
    ckpt_path: str | os.PathLike[str],
    data_type: str = "auto",
    device: str | torch.device = "cuda",
    multi_gpu: bool | str | None = False,
    multi_device: bool = False,
    attn_implementation: str | None = "eager",
    trust_remote_code: bool = False,
) -> tuple[nn.Module, torch.dtype]:
    """Return a causal language model in eval mode, on the device, and its type.

    `data_type` is auto (that of the files), float16, bfloat16 or float32. `multi_gpu` and `multi_device` make no
    difference: layers are quantized one after the other, which one device has the memory for. Python code in the folder
    is run only with `trust_remote_code`, which AMD Quark sets by default.
    """
    if data_type not in _DTYPES:
        raise unknown_name("data_type", data_type, _DTYPES)
    if multi_gpu or multi_device:
        _LOG.info("multi_gpu and multi_device make no difference: the model is on one device, %s", device)
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    loader = _transformers().AutoModelForCausalLM
    dtype = _DTYPES[data_type]
    model: nn.Module = loader.from_pretrained(
        ckpt_path, dtype="auto" if dtype is None else dtype, trust_remote_code=trust_remote_code, **options
    )
    return model.to(device).eval(), next(model.parameters()).dtype


def get_tokenizer(
    ckpt_path: str | os.PathLike[str],
    max_seq_len: int = 2048,
    model_type: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Return the tokenizer of a model, with a token for padding. `model_type` makes no difference."""
    tokenizer = _transformers().AutoTokenizer.from_pretrained(
        ckpt_path, model_max_length=max_seq_len, padding_side="left", trust_remote_code=trust_remote_code
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def get_calib_dataloader(
    dataset_name: str,
    processor: Any = None,
    tokenizer: Any = None,
    batch_size: int = 1,
    num_calib_data: int = 512,
    seqlen: int = 512,
    device: str | torch.device | None = None,
) -> DataLoader[torch.Tensor]:
    """Return `num_calib_data` rows of `seqlen` tokens, evenly spaced over a text, in batches.

    `dataset_name` is one of the datasets of Hugging Face that AMD's scripts name (pileval, wikitext, cnn_dailymail),
    which the package datasets downloads, or the path of a text file.
    """
    if processor is not None:
        raise UnsupportedOptionError("processor: calibration data are texts; leave it out")
    if tokenizer is None:
        raise InvalidValueError("tokenizer: expected that of the model, as from get_tokenizer")
    ids = tokenizer(_text(dataset_name, num_calib_data * seqlen), add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < 2:
        raise InvalidValueError(f"'{dataset_name}' has {len(ids)} tokens: expected at least 2")
    rows = torch.cat(pieces(torch.tensor(ids), seqlen, num_calib_data))
    return DataLoader(rows if device is None else rows.to(device), batch_size=batch_size)  # type: ignore[arg-type]


def _text(name: str, tokens: int) -> str:
    """The content of a file, or enough of a dataset for so many tokens."""
    if Path(name).is_file():
        return read_text(name, f"text '{name}'", _MOST_BYTES)
    if name not in _DATASETS:
        raise unknown_name("dataset_name", name, [*_DATASETS, "the path of a text file"])
    try:
        from datasets import load_dataset  # noqa: PLC0415 - heavy, and optional
    except ImportError as error:
        raise MissingDependencyError("datasets is not installed: pip install datasets, or name a text file") from error
    path, configuration, split, column = _DATASETS[name]
    texts: list[str] = []
    count = 0
    for row in load_dataset(path, configuration, split=split):
        texts.append(row[column])
        count += len(row[column])
        if count > 8 * tokens:  # a token has four to five characters
            break
    return "\n\n".join(texts)


def check_compatibility_before_quantization(model: nn.Module, raise_on_error: bool = False) -> bool:
    """True if a model can be quantized layer by layer."""
    is_compatible = is_language_model(model)
    if not is_compatible:
        message = f"{type(model).__name__} is not a causal language model with a list of layers"
        if raise_on_error:
            raise ModelError(message)
        _LOG.warning(message)
    return is_compatible


def preprocess_for_quantization(model: nn.Module, reload: bool = False) -> None:
    """Do nothing: layers are found in the model as transformers makes it, so it need not be patched."""


prepare_for_moe_quant = preprocess_for_quantization
revert_model_patching = preprocess_for_quantization


def save_model(model: nn.Module, tokenizer: Any, save_dir: str | os.PathLike[str]) -> None:
    """Write a float model and its tokenizer."""
    model.save_pretrained(save_dir)  # type: ignore[operator]
    if tokenizer is not None:
        tokenizer.save_pretrained(save_dir)


def set_seed(seed: int) -> None:
    """Seed the random numbers of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _transformers() -> Any:
    try:
        import transformers  # noqa: PLC0415 - heavy, and optional
    except ImportError as error:
        raise MissingDependencyError("transformers is not installed: pip install transformers") from error
    return transformers
