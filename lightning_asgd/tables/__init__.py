"""Tables of embeddings in files, of which a process holds only the rows that it uses."""
