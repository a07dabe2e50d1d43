"""Pages in a browser, for the tests of this folder."""

import pytest
from browser import open_browser, reason_to_skip
from made_diagnosis import made_diagnosis

from quark.report.page import page_of

FRESH = """
localStorage.clear();
delete document.documentElement.dataset.theme;
document.documentElement.style.scrollBehavior = "auto";
"""


@pytest.fixture(scope="session")
def window():
    if reason_to_skip():
        pytest.skip(reason_to_skip())
    with open_browser() as browser:
        yield browser


@pytest.fixture
def load(window, tmp_path):
    """Opens the page of a diagnosis at a usual size; afterwards nothing may have been logged."""

    def opened(diagnosis, width=1280, height=900):
        path = tmp_path / "page.html"
        path.write_text(page_of(diagnosis), encoding="utf-8")
        window.resize(width, height)
        window.emulate()
        window.console()
        window.seconds = window.open(path)
        window.run(FRESH)
        return window

    yield opened
    assert window.console() == []


@pytest.fixture
def page(load):
    return load(made_diagnosis())
