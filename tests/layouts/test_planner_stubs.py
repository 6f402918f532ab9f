"""The type stub says what the compiled planner offers."""

import ast
import re
from pathlib import Path

import gistkit.layouts
from gistkit import _planner

STUB = Path(gistkit.layouts.__file__).parent.parent / "_planner.pyi"


def from_stub() -> dict[str, dict[str, str]]:
    functions = [node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {
        function.name: {a.arg: ast.unparse(a.annotation) for a in function.args.args if a.annotation}
        for function in functions
    }


def from_module() -> dict[str, dict[str, str]]:
    found = {}
    for name, function in vars(_planner).items():
        if callable(function):
            signature = re.match(rf"{name}\((.*)\) -> ", function.__doc__)
            assert signature, f"{name} has no signature in its docstring"
            parsed = ast.parse(f"def f({signature[1]}): ...").body[0]
            assert isinstance(parsed, ast.FunctionDef)
            found[name] = {a.arg: ast.unparse(a.annotation) for a in parsed.args.args if a.annotation}
    return found


def normal(annotation: str) -> str:
    # pybind11 writes full names, and what converts to an int or a float.
    short = annotation.replace("numpy.typing.NDArray", "NDArray").replace("numpy.", "np.")
    return {"typing.SupportsInt | typing.SupportsIndex": "int", "typing.SupportsInt": "int"}.get(short, short)


def test_stub_matches_the_module() -> None:
    module = {name: {a: normal(t) for a, t in arguments.items()} for name, arguments in from_module().items()}
    assert module
    assert module == from_stub()
