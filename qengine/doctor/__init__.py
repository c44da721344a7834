"""`qengine doctor`: what this machine has, which formats run on it and how, and whether its kernels compute rightly."""
