"""The algebra of equalizing: numbers only, no graph."""
