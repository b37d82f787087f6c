"""`python -m pentamesh`."""

from pentamesh.cli import main

main()
