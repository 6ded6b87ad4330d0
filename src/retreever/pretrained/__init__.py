"""Trained weights that come with the package: loaded offline, verified, each with a card that says what it is."""
