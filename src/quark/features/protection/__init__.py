"""Protection: keep in float the parts of a network that 8 bits would break.

options      whether and how much is protected
structures   parts of a graph that are known to break, recognised by their form
on_onnx      a search by measurement: ranges, placement, single layers
"""
