"""8-bit float KV cache: e4m3 and e5m2, stored as bytes, on every supported device."""
