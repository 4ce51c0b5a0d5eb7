"""A service's process on the bus: membership of other services, ports to the outside, lifecycle."""
