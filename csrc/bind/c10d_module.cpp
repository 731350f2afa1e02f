// The Python module `ringcomm._c10d`: torch.distributed's backend over an engine of `ringcomm._C`.
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <torch/version.h>

#include "bind/c10d_backend.h"
#include "bind/error_class.h"

namespace ringcomm {
namespace {

const char* python_class(const Error& error) {
  if (const auto* argument = dynamic_cast<const ArgumentError*>(&error)) return argument->python_class();
  return error_class(error.code());
}

// ringcomm.backend holds every class of ringcomm.errors, those of failed communication also as DistBackendError.
void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const py::object type = py::module_::import("ringcomm.backend").attr(python_class(error));
    PyErr_SetString(type.ptr(), error.what());
  }
}

std::shared_ptr<Engine> engine_of(const py::capsule& capsule) {
  return *static_cast<std::shared_ptr<Engine>*>(PyCapsule_GetPointer(capsule.ptr(), "ringcomm.Engine"));
}

}  // namespace
}  // namespace ringcomm

PYBIND11_MODULE(_c10d, m) {
  using ringcomm::Backend;
  py::module_::import("torch._C._distributed_c10d");
  py::register_exception_translator(ringcomm::translate);
  m.attr("built_for") = TORCH_VERSION;

  py::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>> backend(m, "Backend");
  py::class_<Backend::Options, c10d::Backend::Options, c10::intrusive_ptr<Backend::Options>>(backend, "Options")
      .def(py::init([](std::chrono::milliseconds timeout) { return c10::make_intrusive<Backend::Options>(timeout); }),
           py::arg("timeout") = kBackendDefaultTimeout)
      .def("__copy__", [](const Backend::Options& self) { return c10::make_intrusive<Backend::Options>(self); })
      .def("__deepcopy__",
           [](const Backend::Options& self, const py::dict&) { return c10::make_intrusive<Backend::Options>(self); });
  backend.def(py::init([](const py::capsule& engine, const c10::intrusive_ptr<Backend::Options>& options) {
                return c10::make_intrusive<Backend>(ringcomm::engine_of(engine), options);
              }),
              py::arg("engine"), py::arg("options"));
  backend.def_property_readonly("options", &Backend::getBackendOptions);
  backend.def("get_error", &Backend::getError);
}
