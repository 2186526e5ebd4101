"""`python -m gateway` is the command `kvgate`."""

from gateway.cli import main

main()
