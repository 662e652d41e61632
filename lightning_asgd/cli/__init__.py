"""The command line, ``lightning-asgd``: a module per command, gathered by :mod:`lightning_asgd.cli.command_line`."""
