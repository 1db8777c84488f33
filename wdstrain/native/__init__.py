"""The C library (`kernels.c`) and its binding."""
