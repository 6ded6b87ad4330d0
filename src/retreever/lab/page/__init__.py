"""The live page: exported models in a browser, with every step of their searches."""
