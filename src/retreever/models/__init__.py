"""Models: compositions of embedding, encoder, read-out and head. All answer the same calls."""
