"""crc32 of bytes, equal to that of zlib and gzip.

Every byte is checksummed when it is packed and when it is read. isal's version is used, which is
several times as fast as zlib's.
"""

from isal.isal_zlib import crc32

__all__ = ["crc32"]
