"""Which releases of Triton the Gluon kernels were compiled under."""


def is_served(version: str) -> bool:
    """True for 3.6 to 3.9 (any patch release): Gluon's API moves with minor releases."""
    return version.split(".")[:2] in (["3", "6"], ["3", "7"], ["3", "8"], ["3", "9"])
