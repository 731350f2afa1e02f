// The Python module `ringcomm._c10d`: torch.distributed's backend over an engine of `ringcomm._C`. A wheel has one for
// each version of torch, such as `_c10d_2_13`, of which ringcomm/_c10d.py chooses one.
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <torch/version.h>

#include "bind/c10d/backend.h"
#include "bind/c10d/transport.h"
#include "bind/capsule.h"
#include "bind/error_class.h"
#include "bind/raise.h"

namespace ringcomm {
namespace {

const char* python_class(const Error& error) {
  if (const auto* argument = dynamic_cast<const ArgumentError*>(&error)) return argument->python_class();
  return error_class(error.code());
}

// Raises the class from ringcomm.backend, which has all of ringcomm.errors; those for failed communication are
// subclasses of DistBackendError there too.
void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const Error& error) {
    raise_in_python("ringcomm.backend", python_class(error), error, advice_to_groups(error.what()));
  }
}

// Returns a transport in a capsule, for `_C.hierarchical_engine`.
py::capsule transport_over(const c10::intrusive_ptr<c10d::Backend>& group, const std::string& name, int first_tag) {
  return to_capsule(make_group_transport(group, name, first_tag));
}

// Wraps a ringcomm.backend.DeviceEngineFactory, so that it can be called and destroyed without the GIL.
DeviceGroup::EngineFactory factory_of(py::object made_in_python) {
  const auto drop = [](py::object* held) {
    if (Py_IsInitialized() == 0) return;  // the interpreter is gone
    const py::gil_scoped_acquire gil;
    delete held;
  };
  auto held = std::shared_ptr<py::object>(new py::object(std::move(made_in_python)), drop);
  return {[held](const char* call, c10::Device device) {
            const py::gil_scoped_acquire gil;
            return from_capsule<Engine>(held->attr("make")(call, int{device.index()}));
          },
          [held](const char* call) {
            const py::gil_scoped_acquire gil;
            return from_capsule<Engine>(held->attr("connect")(call));
          }};
}

}  // namespace
}  // namespace ringcomm

PYBIND11_MODULE(RINGCOMM_C10D, m) {
  using ringcomm::Backend;
  py::module_::import("torch._C._distributed_c10d");
  py::register_exception_translator(ringcomm::translate);
  m.attr("built_for") = TORCH_VERSION;

  m.attr("TAGS") = ringcomm::kTags;  // number of tags that a transport uses
  m.def("transport_over", &ringcomm::transport_over, py::arg("group"), py::arg("name"), py::arg("first_tag") = 0,
        "A transport between hosts over the sends and receives of a process group's backend, as a capsule for _C.");

  py::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>> backend(m, "Backend");
  py::class_<Backend::Options, c10d::Backend::Options, c10::intrusive_ptr<Backend::Options>>(backend, "Options")
      .def(py::init([](std::chrono::milliseconds timeout) { return c10::make_intrusive<Backend::Options>(timeout); }),
           py::arg("timeout") = kBackendDefaultTimeout)
      .def("__copy__", [](const Backend::Options& self) { return c10::make_intrusive<Backend::Options>(self); })
      .def("__deepcopy__",
           [](const Backend::Options& self, const py::dict&) { return c10::make_intrusive<Backend::Options>(self); });
  backend.def(py::init([](const py::capsule& engine, const c10::intrusive_ptr<Backend::Options>& options,
                          py::object device_factory, bool host_memory) {
                return c10::make_intrusive<Backend>(ringcomm::from_capsule<ringcomm::Engine>(engine), options,
                                                    ringcomm::factory_of(std::move(device_factory)), host_memory);
              }),
              py::arg("engine"), py::arg("options"), py::arg("device_factory"), py::arg("host_memory") = false);
  // Because supports_splitting is true, torch calls this on ranks that are not in a new group, as NCCL needs them, too.
  backend.def("perform_nocolor_split", [](Backend&, const py::object&) {}, py::arg("device"));
  backend.def_property_readonly("options", &Backend::getBackendOptions);
  backend.def("get_error", &Backend::getError);
}
