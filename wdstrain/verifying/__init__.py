"""Shards are read whole and compared with what is promised of them; what is whole in damaged ones is copied out."""
