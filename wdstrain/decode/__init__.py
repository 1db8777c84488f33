"""Bytes to values: fields, image codecs, augmentation, batch memory, decoders in threads and worker processes."""
