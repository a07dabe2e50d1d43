"""Cross-layer equalization: channels between layers are rescaled so that weights quantize better; exact in float.

regions       what has to be scaled together: tensors, and the layers that write and read them
scales        which scales are wanted, from magnitudes alone
cross_layer   both, for a graph of either road
on_onnx, on_torch   measuring the data beforehand, and writing the scales
"""
