"""Drop-in torch modules for models over layouts."""

from gistkit.nn.roles import LowRank, RoleLinear

__all__ = ["LowRank", "RoleLinear"]
