"""Conversions of models: number types, quantizers, shapes, layouts. Each is a function from one model to another."""
