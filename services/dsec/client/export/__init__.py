"""Episodes as files, in three formats: what is written is what `Client.episodes` gives.

`record` is what all formats have in common; each format is a writer that takes episodes one by one.
"""
