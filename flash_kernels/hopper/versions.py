"""Which releases of Triton the Gluon kernels were compiled under."""


def is_served(version: str) -> bool:
    """True for 3.6, 3.7 and 3.8 (any patch release): Gluon's API moves with minor releases."""
    return version.split(".")[:2] in (["3", "6"], ["3", "7"], ["3", "8"])
