"""anchor-sync: takes what sessions captured to the object store, and says what became of it."""
