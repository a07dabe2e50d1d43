"""Where scripts written for other versions look for the operator library."""
