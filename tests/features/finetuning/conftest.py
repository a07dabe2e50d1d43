from collections.abc import Iterator

import pytest
import torch

import quark.features.finetuning.fit as fitting


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The layers of tests are so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["compiled code", "torch"])
def fitted_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What fits a layer. Where there is no compiled code, it is torch that does both."""
    if request.param == "torch":
        monkeypatch.setattr(fitting, "is_compiled", lambda problem, options: False)
    return str(request.param)
