"""AWQ: weights of large inputs are scaled up before they are rounded, and ranges are cut for less error."""
