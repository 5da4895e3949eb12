"""`python -m workbench`: the program, where its script is not on the path."""

from workbench.cli.app import main

main()
