"""Programs for those who work on the repository. They are not installed; run them as `python -m tools.NAME`."""
