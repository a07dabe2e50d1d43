"""`export_for_training` under the path that scripts import it from."""

from __future__ import annotations

from typing import Any


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
