"""The one error a user's own input can cause."""


class ConfigError(ValueError):
    """A flag, mesh, size or file that cannot work, found before anything is traced.

    Programs print its message alone and exit with code 2. A message has three parts: what was asked, what is
    required and why, what would work.
    """

    def __init__(self, asked: str, required: str, remedy: str):
        super().__init__(f"{asked}: {required}. {remedy.removesuffix('.')}.")
