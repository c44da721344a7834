"""What qengine asks of every KV dtype."""

from qengine_kv_int8 import Int8KV

from qengine.plugin.conformance import KVConformance


class TestInt8(KVConformance):
    plugin = Int8KV
