"""The card of an exported network, which `quark reproduce` reads."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from quark.card import Card, TorchFacts
from quark.onnx.versions import versions
from quark.plan import QuantizationPlan
from quark.torch.origin import Origin


def card_of(
    origin: Origin,
    network: fx.GraphModule,
    example: Sequence[torch.Tensor],
    plan: QuantizationPlan,
    options: Mapping[str, Any],
    widened: Sequence[str] = (),
) -> Card:
    """Return the card, except for the file that is still to be written."""
    names = [str(node.target) for node in network.graph.nodes if node.op == "placeholder"]
    inputs = {
        name: (str(x.dtype).removeprefix("torch."), tuple(map(int, x.shape)))
        for name, x in zip(names, example, strict=True)
    }
    plain = {name: value for name, value in options.items() if isinstance(value, (bool, int, tuple, type(None)))}
    return Card(
        source=origin.source,
        config_name="",
        config=json.loads(json.dumps(dict(origin.config), default=str)),
        data=origin.data,
        versions={**versions(), "torch": importlib.metadata.version("torch")},
        plan_sha256=plan.digest,
        functions=origin.unkept,
        torch=TorchFacts(
            inputs=inputs,
            options=json.loads(json.dumps(plain)),
            state_sha256=origin.state_sha256,
            is_trained=origin.state_sha256 != origin.calibrated_sha256,
            widened=tuple(widened),
            request=origin.request,
        ),
    )
