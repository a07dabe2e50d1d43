"""Files: what is written is written whole (`output`), and what others wrote is read within bounds (`foreign`)."""
