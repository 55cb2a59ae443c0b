"""Envoy in front of the gateway: its configuration, and its process beside the picker's."""
