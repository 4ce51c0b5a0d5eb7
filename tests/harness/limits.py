"""Limits of waits for a state."""

from typing import Final

HANG_S: Final = 60.0
"""What only a hang exceeds, on the slowest of machines. A test whose claim is a time states its own limit."""
START_S: Final = 300.0
"""The same for the start of engines, which load one after the other."""
FREED_S: Final = 20.0
"""Time for freeing what a request held. A lease that is forgotten lives longer (`unclaimed_ttl_s`)."""
