"""GPU and CPU kernels: one folder per operation, knowing no model, no format and no other part of qengine.

Each folder holds `__init__.py` (picks an implementation and launches it), the Triton templates, and `reference.py`
(the meaning in plain torch, importable without Triton). Formats come in as injected device functions.
"""
