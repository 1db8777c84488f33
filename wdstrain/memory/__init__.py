"""Memory that bytes are read into: shared, page-locked, the arena, scatter lists."""
