"""`TQTObserver` under the path that scripts import it from."""

from quark.torch.quantization.observer.observer import TQTObserver

__all__ = ["TQTObserver"]
