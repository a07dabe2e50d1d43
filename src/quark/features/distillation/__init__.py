"""Distillation: all weights are trained together, with quantizers, to give the float network's outputs."""
