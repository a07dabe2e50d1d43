"""Speed and accuracy, each figure a ratio to a reference of the same run. Run as `python -m bench.NAME`."""
