"""What `quark doctor` looks at, one subject a file. No package is used before it was looked at."""
