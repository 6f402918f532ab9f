// NumPy bindings of the planner. Tensor-free: torch never crosses this boundary.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

namespace py = pybind11;

PYBIND11_MODULE(_planner, m) { m.doc() = "Compiles layouts to plans, over NumPy arrays."; }
