"""The mesh, the sharding rules, and the collectives that the model calls."""
