"""Trained weights that come with the package: loaded offline, verified, each with a card that describes it."""
