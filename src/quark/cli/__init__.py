"""The `quark` command. Thin: each command parses, calls the library, prints."""
