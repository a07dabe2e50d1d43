"""Accuracy features, one folder each: options, algebra, how it is applied to a graph of either road, report line."""
