"""`LSQObserver` under the path that scripts import it from."""

from quark.torch.quantization.observer.observer import LSQObserver

__all__ = ["LSQObserver"]
