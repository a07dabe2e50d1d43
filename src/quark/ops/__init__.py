"""A number format as an operator: as an ONNX node, as a torch function to train through, as native code.

Import the module that is meant; nothing is loaded from here, so that the ONNX side works without torch.
"""
