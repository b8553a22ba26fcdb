"""What is not installed, and how to install it."""

import importlib


def need(extra: str, *libraries: str) -> None:
    """Raise if a library is missing, naming the extra of jmp-lite that installs it.

    Raises:
      ModuleNotFoundError: one of the libraries is not installed.
    """
    for library in libraries:
        try:
            importlib.import_module(library)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing != library.partition(".")[0]:
                raise  # of another library
            raise ModuleNotFoundError(
                f'{missing} is not installed: pip install "jmp-lite[{extra}]", in a '
                f'clone ".[{extra}]"',
                name=error.name,
            ) from None
