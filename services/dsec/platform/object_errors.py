"""What an object store says when it cannot do what was asked."""


class ObjectStoreError(Exception):
    """The store cannot do what was asked. Says which blob and why. It may come back."""


class BlobNotFound(ObjectStoreError):
    """The store is there, and the blob is not."""


class BlobDamaged(ObjectStoreError):
    """The store gave other bytes than the blob's name stands for."""
