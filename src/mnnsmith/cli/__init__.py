"""The command line: a verb a file."""
