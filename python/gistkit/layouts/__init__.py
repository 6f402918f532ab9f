"""Layouts: who sees whom, at which position, and the builders for each method."""

from gistkit.layouts.plan import Plan

__all__ = ["Plan"]
