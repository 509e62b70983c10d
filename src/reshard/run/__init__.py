"""Running plans: in one process on numpy arrays (``simulate``), the oracle of all other ways."""
