"""`python -m quark` is the `quark` command, also where scripts of packages are not on the path."""

from quark.cli.main import main

if __name__ == "__main__":
    main(prog_name="quark")
