"""The papers' experiments at a size that runs on a laptop: one module a study."""
