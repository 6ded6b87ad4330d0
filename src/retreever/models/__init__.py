"""Models: compositions of embedding, encoder, read-out and head, all with the same methods."""
