"""Commands on pretrained weights: export from runs, score, list."""
