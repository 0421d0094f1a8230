"""Experiments whose clients are reached through Flower.

A SuperLink hands over what belongs to its server by these variables of its environment.
"""

SERVER_PLUGINS = "FEDLENS_SERVER_PLUGINS"  # the plugins of its command line
SERVER_SHARD = "FEDLENS_SERVER_SHARD"  # the folder of the server's own data
