// The Python error for one of ours; both Python modules raise by it.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "core/error.h"

namespace ringcomm {

// Where a communicator ends, ringcomm.record notes what its ranks did; that raises nothing but an interrupt.
// A handler of a signal may have raised already, and so ended the call: that goes first. `text` is in the error's
// place.
inline void raise_in_python(const char* module, const char* name, const Error& error, const std::string& text) {
  namespace py = pybind11;
  if (PyErr_Occurred()) return;
  try {
    const py::object type = py::module_::import(module).attr(name);
    // A path or the reason of another process may be no UTF-8.
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
