"""Cross-layer equalization: channels between layers are rescaled so that weights quantize better; exact in float.

regions       what has to be scaled together: tensors, and the layers that write and read them
scales        which scales are wanted, from magnitudes alone
cross_layer   the two put together, for a graph of either road
on_onnx, on_torch   the look at the data before, and the writing of the scales
"""
