"""Training: settings, the loop, and what it shows while it runs."""
