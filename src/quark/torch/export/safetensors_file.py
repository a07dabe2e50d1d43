"""The quantized state of a frozen network: `model.safetensors`, and `config.json` that says what is in it.

    model.safetensors    parameters as codes, packed bits or floats (`stored_tensors`); all other state as it is
    config.json          version, how each parameter is stored, the plan, the configuration it was quantized by

It is read into a network of the same architecture, which then gives the same outputs, bit for bit. A file is data:
names, types, shapes and sizes are checked against the network before anything is taken from it, and nothing in it is
executed.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

import quark
from quark.errors import InvalidValueError, MissingDependencyError, ModelError, UnsupportedTypeError
from quark.files.foreign import REPORT, Fields, read_json
from quark.onnx.save import complete, write_text, writing
from quark.plan import AffineChoice, Choice, QuantizationPlan
from quark.torch.export.deployable import frozen
from quark.torch.export.stored_tensors import Stored, Tensors, restore, store
from quark.torch.graph import attribute_of, module_of
from quark.torch.train.networks import FrozenNetwork, with_state
from quark.torch.train.quantizers import Quantizer

WEIGHTS, CONFIG = "model.safetensors", "config.json"
VERSION = 1


def export_safetensors(
    model: nn.Module, folder: str | os.PathLike[str], *, has_codes: bool = True
) -> tuple[Path, Path]:
    """Write the state of a frozen network into the folder, which is made where it is missing; the two files.

    A network that still trains is frozen first, in a copy. Without `has_codes`, quantized parameters are written as the
    float numbers that their codes stand for.
    """
    save = _safetensors().save_file
    network = frozen(model)
    if not isinstance(network, FrozenNetwork):
        raise UnsupportedTypeError("model: expected a quantized network, got a float one; torch.save writes its state")
    target = Path(folder)
    with writing(target):
        target.mkdir(parents=True, exist_ok=True)
    choices = parameter_choices(network)
    described: dict[str, Any] = {}
    tensors: Tensors = {}
    for name, value in network.state_dict().items():
        choice = choices.get(name)
        if choice is not None and not has_codes:
            value = _rounded_values(name, value, choice)
            choice = None
        stored, parts = store(name, value, choice)
        described[name] = stored.to_json()
        tensors |= parts
    content = {
        "quark_version": quark.__version__,
        "version": VERSION,
        "tensors": described,
        "plan": json.loads(network.plan.to_json()),
        "config": dict(network.config),
    }
    text = json.dumps(content, indent=1, default=str)
    with complete(target / WEIGHTS) as temporary:
        save(tensors, temporary, metadata={"format": "pt"})
    write_text(text, target / CONFIG)
    return target / WEIGHTS, target / CONFIG


def load_safetensors(network: FrozenNetwork, folder: str | os.PathLike[str]) -> FrozenNetwork:
    """A copy of the network with the state that was written to the folder. A ModelError names what does not fit."""
    path = Path(folder) / CONFIG
    label = f"'{path}' (export_safetensors writes it)"
    content = Fields(read_json(path, label, REPORT, ModelError), label, error=ModelError)
    if content.value("version") != VERSION:
        raise ModelError(f"'{path}': expected the description of a quantized state of version {VERSION}")
    try:
        plan = QuantizationPlan.from_dict(content.value("plan"), f"'{path}', plan")
    except InvalidValueError as error:
        raise ModelError(str(error)) from error
    _check_plan(network, plan)
    state = network.state_dict()
    entries = content.mapping("tensors")
    described = {name: _stored(entries.mapping(name)) for name in entries}
    _check_names(described, state)
    for name, stored in described.items():
        here = state[name]
        if stored.shape != tuple(here.shape) or f"torch.{stored.dtype}" != str(here.dtype):
            raise ModelError(
                f"'{name}' is {stored.dtype} of shape {stored.shape} in the file, and {here.dtype} of shape "
                f"{tuple(here.shape)} in the network"
            )
    tensors = _read_tensors(Path(folder) / WEIGHTS, described)
    choices = _choices_of(plan, parameter_choices(network))
    loaded = {name: restore(name, stored, tensors, choices.get(name)) for name, stored in described.items()}
    config = dict(content.mapping("config").content)
    result = copy.deepcopy(network)
    result.load_state_dict(loaded)
    made: FrozenNetwork = with_state(
        result, FrozenNetwork, {"plan": plan, "config": config, "algorithms": network.algorithms}
    )
    return made.eval().requires_grad_(False)


def parameter_choices(network: fx.GraphModule) -> dict[str, Choice]:
    """What is done to the parameters of a frozen network; not those that two quantizers treat differently."""
    found: dict[str, Choice] = {}
    disputed: set[str] = set()
    for node in network.graph.nodes:
        module = module_of(network, node)
        source = node.args[0] if node.args else None
        if not isinstance(module, Quantizer) or attribute_of(network, source) is None:
            continue
        assert isinstance(source, fx.Node)
        name, choice = str(source.target), module.choice()
        if found.setdefault(name, choice) != choice or any(user is not node for user in source.users):
            disputed.add(name)
    return {name: choice for name, choice in found.items() if name not in disputed}


def _rounded_values(name: str, value: torch.Tensor, choice: Choice) -> torch.Tensor:
    stored, parts = store(name, value, choice)
    return restore(name, stored, parts, choice).to(value.dtype)


def _choices_of(plan: QuantizationPlan, here: Mapping[str, Choice]) -> dict[str, Choice]:
    """The choices of the file for the parameters that the network quantizes."""
    return {each.tensor: each.choice for each in plan if each.tensor in here}


def _check_plan(network: FrozenNetwork, plan: QuantizationPlan) -> None:
    """That the file quantizes the same tensors in the same formats; numbers may differ."""
    here, there = _kinds(network.plan), _kinds(plan)
    for tensor in sorted(here.keys() | there.keys()):
        if here.get(tensor) != there.get(tensor):
            raise ModelError(
                f"tensor '{tensor}' is quantized to {_words(there.get(tensor))} in the file, and to "
                f"{_words(here.get(tensor))} in the network: quantize the network by the configuration of the file"
            )


def _kinds(plan: QuantizationPlan) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for each in plan:
        choice = each.choice
        is_affine = isinstance(choice, AffineChoice)
        found.setdefault(each.tensor, []).append((str(choice), choice.axis) if is_affine else choice)  # type: ignore[union-attr]
    return found


def _words(kinds: list[Any] | None) -> str:
    return " and ".join(str(each[0] if isinstance(each, tuple) else each) for each in kinds) if kinds else "nothing"


def _check_names(described: Mapping[str, Stored], state: Mapping[str, torch.Tensor]) -> None:
    missing, strange = sorted(state.keys() - described.keys()), sorted(described.keys() - state.keys())
    if missing or strange:
        parts = [f"misses {', '.join(missing[:3])}"] if missing else []
        parts += [f"has {', '.join(strange[:3])}, which the network has not"] if strange else []
        raise ModelError(f"the file is not of this network: it {' and '.join(parts)}")


def _stored(fields: Fields) -> Stored:
    kind = fields.text("kind", ("codes", "packed", "float"))
    if not _is_type(fields.text("dtype")):
        fields.refuse("dtype", "a type of torch")
    return Stored(kind, fields.text("format"), fields.shape("shape"), fields.text("dtype"), fields.texts("parts"))


def _is_type(name: str) -> bool:
    return name.isidentifier() and isinstance(getattr(torch, name, None), torch.dtype)


def _read_tensors(path: Path, described: Mapping[str, Stored]) -> Tensors:
    """The tensors that are described and no others; their sizes are looked at before they are read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            there = set(file.keys())
            wanted = set(described) | {f"{name}.{part}" for name, stored in described.items() for part in stored.parts}
            if there != wanted:
                raise ModelError(
                    f"'{path.name}' and {CONFIG} do not belong together: {', '.join(sorted(there ^ wanted)[:3])}"
                )
            return {name: file.get_tensor(name) for name in sorted(wanted)}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read '{path}': {error}") from error


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise MissingDependencyError("safetensors is not installed: pip install 'quark-quantizer[torch]'") from error
    return safetensors.torch
