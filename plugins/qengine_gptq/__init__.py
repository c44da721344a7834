"""GPTQ weights of 2, 3, 4 and 8 bits, as AutoGPTQ, GPTQModel and optimum write them."""
