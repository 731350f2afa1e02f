// Raises the Python error for an Error; used by both Python modules.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "core/error.h"

namespace ringcomm {

// Raises `module`.`name` with `text` in place of the error's own text. If a signal handler has raised already, which
// ended the call, that exception stays. For an error that ends a communicator, ringcomm.observe.record annotates it
// with the ranks' last calls, which raises nothing but an interrupt.
inline void raise_in_python(const char* module, const char* name, const Error& error, const std::string& text) {
  namespace py = pybind11;
  if (PyErr_Occurred()) return;
  try {
    const py::object type = py::module_::import(module).attr(name);
    // A path, or a reason from another process, may not be valid UTF-8.
    const auto length = static_cast<Py_ssize_t>(text.size());
    const py::object value =
        type(py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(text.c_str(), length, "backslashreplace")));
    if (error.group() != 0) py::module_::import("ringcomm.observe.record").attr("annotate")(value, error.group());
    PyErr_SetObject(type.ptr(), value.ptr());
  } catch (py::error_already_set& other) {
    other.restore();
  }
}

inline void raise_in_python(const char* module, const char* name, const Error& error) {
  raise_in_python(module, name, error, error.what());
}

}  // namespace ringcomm
