"""A combinator's config as one flat list of calls, and the straight-line functions that run it."""
