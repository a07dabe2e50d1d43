"""Rotation: activations between layers are turned by an orthogonal matrix, which spreads outliers over all channels."""
