"""Settings of the export."""
