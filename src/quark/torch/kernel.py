"""A path that scripts for AMD Quark import so that its operators are compiled.

The kernels here are part of the package and are loaded when a model first needs them: nothing is left to do.
"""
