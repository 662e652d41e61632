"""Parts of the weights that are exchanged in turn."""
