"""Protection: keep in float what would break a network in 8 bits.

options      whether and how much is protected
structures   parts of a graph that are known to break, recognised by their form
on_onnx      what measuring finds: ranges, placement, single layers
"""
