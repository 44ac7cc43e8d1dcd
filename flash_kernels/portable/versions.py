"""Which releases of Triton what is not its stable interface was tried with."""


def is_served(version: str) -> bool:
    """True for 3.6 to 3.9 (any patch release): Gluon and the way kernels are launched move with
    minor releases."""
    return version.split(".")[:2] in (["3", "6"], ["3", "7"], ["3", "8"], ["3", "9"])
