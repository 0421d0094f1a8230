"""`python -m fedlens.cli` is `fedlens`."""

from fedlens.cli import main

main()
