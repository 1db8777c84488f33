"""Memory that bytes are read into: shared memory, pinned memory, the arena, scatter lists."""
