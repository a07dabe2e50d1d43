"""Low-rank branches: what is hard to round in a weight goes through a narrow pair of float matrices (SVDQuant)."""
