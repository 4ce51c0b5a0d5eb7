"""How a process lives on the bus: who else is there, its ports to the world, its lifecycle."""
