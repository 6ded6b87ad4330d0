"""Building blocks: attention and feed-forward, embeddings, encoders, heads."""
