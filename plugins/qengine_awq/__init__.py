"""AWQ 4-bit weights in the layouts of AutoAWQ and llm-awq."""
