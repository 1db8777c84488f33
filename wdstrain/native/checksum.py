"""The checksum of a field: crc32 as zip and gzip know it, at the speed of memory.

It is taken of every byte that is packed and again of every byte that is read, so its cost is that of the loader. Measured on
7 KB in the cache: isal 38 GB/s, zlib 6 GB/s; the numbers are the same.
"""

from isal.isal_zlib import crc32

__all__ = ["crc32"]
