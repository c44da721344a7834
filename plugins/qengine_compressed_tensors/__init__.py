"""compressed-tensors checkpoints: integer, FP8 and mixed weights as llm-compressor writes them."""
