"""FP8 (e4m3) weights: AutoFP8, DeepSeek, transformers and ModelOpt files, and 16-bit checkpoints converted at load."""
