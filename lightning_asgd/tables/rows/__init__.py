"""Tables of which only changed rows are exchanged."""
