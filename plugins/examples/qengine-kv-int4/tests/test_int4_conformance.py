"""What qengine asks of every KV dtype."""

from qengine_kv_int4 import Int4KV

from qengine.plugin.conformance import KVConformance


class TestInt4(KVConformance):
    plugin = Int4KV
