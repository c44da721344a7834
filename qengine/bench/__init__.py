"""Workloads for measuring an engine or a server: prompts, timing, figures. What `qengine bench` runs."""
