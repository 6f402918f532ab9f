"""The compiled planner, and what to do when a compiled part is missing or broken."""

INSTALL_AGAIN = (
    "with torch installed, install gistkit again from its source folder: "
    "pip install --no-build-isolation --force-reinstall --no-deps ."
)

try:
    from gistkit import _planner as planner
except ImportError as error:
    raise ImportError(
        f"gistkit's compiled planner is missing or could not be loaded ({error}): {INSTALL_AGAIN}."
    ) from error

__all__ = ["INSTALL_AGAIN", "planner"]
