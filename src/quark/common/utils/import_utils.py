"""What scripts ask about the packages that are installed, and `export_for_training`, under the paths that they use."""

from __future__ import annotations

from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from quark.text import version_numbers


def _has(module: str) -> bool:
    return find_spec(module) is not None


def _version(package: str) -> tuple[int, ...] | None:
    try:
        return version_numbers(version(package))
    except PackageNotFoundError:
        return None


is_accelerate_available = partial(_has, "accelerate")
is_compressed_tensors_available = partial(_has, "compressed_tensors")
is_datasets_available = partial(_has, "datasets")
is_diffusers_available = partial(_has, "diffusers")
is_huggingface_hub_available = partial(_has, "huggingface_hub")
is_matplotlib_available = partial(_has, "matplotlib")
is_onnxruntime_genai_available = partial(_has, "onnxruntime_genai")
is_optimum_available = partial(_has, "optimum")
is_pil_available = partial(_has, "PIL")
is_psutil_available = partial(_has, "psutil")
is_requests_available = partial(_has, "requests")
is_safetensors_available = partial(_has, "safetensors")
is_torch_available = partial(_has, "torch")
is_torchao_available = partial(_has, "torchao")
is_transformers_available = partial(_has, "transformers")
is_triton_available = partial(_has, "triton")
is_vllm_available = partial(_has, "vllm")


def is_gguf_available_and_minimum_version(minimum_version: str = "0.10.0") -> bool:
    """True if the package gguf is there, of that version or newer."""
    installed = _version("gguf")
    return installed is not None and installed >= version_numbers(minimum_version)


def is_package_lower_or_equal(package_name: str, target_version: str) -> bool:
    """True if the package is there, of that version or older."""
    installed = _version(package_name)
    return installed is not None and installed <= version_numbers(target_version)


def is_transformers_version_higher_or_equal(target_version: str) -> bool:
    """True if transformers is there, of that version or newer."""
    installed = _version("transformers")
    return installed is not None and installed >= version_numbers(target_version)


def is_transformers_version_lower(target_version: str) -> bool:
    """True if transformers is there and older than that."""
    installed = _version("transformers")
    return installed is not None and installed < version_numbers(target_version)


def _has_torch(least: str) -> bool:
    installed = _version("torch")
    return installed is not None and installed >= version_numbers(least)


is_torch_greater_or_equal_2_5 = partial(_has_torch, "2.5")
is_torch_greater_or_equal_2_7 = partial(_has_torch, "2.7")


def export_for_training(
    mod: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, dynamic_shapes: Any = None
) -> Any:
    """Export a module to a program, under the name that the installed torch has for it.

    The batch stays dynamic, as with `quark.torch.export_for_training`; `dynamic_shapes` replaces that, and is passed to
    torch unchanged.
    """
    if dynamic_shapes is not None:
        import torch

        # torch 2.6 to 2.9 have a name of their own for what later versions' export does
        export = getattr(torch.export, "export_for_training", torch.export.export)
        return export(mod, args, kwargs, dynamic_shapes=dynamic_shapes)
    from quark.torch import export_for_training as with_dynamic_batch

    return with_dynamic_batch(mod, args, kwargs)
