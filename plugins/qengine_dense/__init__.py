"""16-bit (and float32) weights, and the KV cache that stores what is computed: ordinary plugins of the contracts."""
