"""What can be said about exporting."""
