"""`python -m mnnsmith.cli`, where the console script is not on the path."""

from mnnsmith.cli.main import main

main()
