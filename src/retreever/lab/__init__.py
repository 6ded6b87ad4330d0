"""The lab: recipes, experiments, benchmarks, figures, demo and doctor. The library below never imports it."""
