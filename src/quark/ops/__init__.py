"""A number format as an operator: an ONNX node, a torch function to train through, compiled code.

Nothing is imported here, so that the ONNX side works without torch: import the modules themselves.
"""
