"""Makes quantised checkpoints from 16-bit ones."""
