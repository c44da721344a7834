"""AWQ 4-bit weights in AutoAWQ's gemm layout."""
