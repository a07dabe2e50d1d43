"""The pipeline, and the configuration and observers under the names that AMD uses."""
