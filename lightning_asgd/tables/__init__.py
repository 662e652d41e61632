"""Tables of embeddings."""
