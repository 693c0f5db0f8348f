"""The command line: one module for each group of commands; `app` is where it starts."""
