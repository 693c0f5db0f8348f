"""The command line: a module for each command; `app` is the entry point."""
