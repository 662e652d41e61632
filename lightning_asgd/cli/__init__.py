"""The command line, ``lightning-asgd``: one module per command, collected by :mod:`lightning_asgd.cli.command_line`."""
