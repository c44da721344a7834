"""The conformance kit: checks that a plugin keeps the contract, whoever wrote it.

Plugin authors import it as `qengine.plugin.conformance`. It is a room of its own because it asks more than the
contracts know: what the engine's loader, cache binding and kernel templates make of a plugin.
"""
