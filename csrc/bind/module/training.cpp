// The training layer's work for each parameter in each step, which would take too long in Python.
//
// Autograd calls a hook when it is about to add a gradient to a parameter. The hook is a plain C function and only
// notes the parameter. Python is called if there is more to do: before the first gradient of a bucket, in a pass nested
// in another one, and when a bucket has all its gradients.
#include <pybind11/pybind11.h>

#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "bind/module/define.h"
#include "core/scope_exit.h"
#include "runtime/crc32c.h"

namespace py = pybind11;

namespace ringcomm {

namespace {

constexpr const char* kHook = "ringcomm.arrival_hook";

struct Arrivals {
  py::object current_task;   // () -> autograd's number of the current pass; negative: none
  long long expected = -1;   // the pass whose gradients are recorded without calling Python; -1: none
  int adding = -1;           // the bucket of the last recorded gradient, which autograd may still be adding
  unsigned long thread = 0;  // the thread that adds it
  bool is_last = false;      // whether that bucket has all its gradients, and Python has not been told yet
};

struct Hook {
  std::shared_ptr<Arrivals> arrivals;
  int group;
  Py_ssize_t params;      // number of parameters in the group
  py::object index;       // of the parameter, within the group
  py::list arrival_sets;  // two sets: parameters seen, and those with a gradient; empty: none expected
  py::object prepare;
};

bool is_expected(const Hook& hook) {
  if (hook.arrivals->expected < 0 || hook.arrival_sets.size() != 2) return false;
  return hook.arrivals->current_task().cast<long long>() == hook.arrivals->expected;
}

void note(const Hook& hook, bool defined) {
  Arrivals& arrivals = *hook.arrivals;
  PyObject* const come = PyList_GET_ITEM(hook.arrival_sets.ptr(), 0);
  if (PySet_Add(come, hook.index.ptr())) throw py::error_already_set();
  if (defined && PySet_Add(PyList_GET_ITEM(hook.arrival_sets.ptr(), 1), hook.index.ptr()))
    throw py::error_already_set();
  arrivals.adding = hook.group;
  arrivals.thread = PyThread_get_thread_ident();
  arrivals.is_last = PySet_GET_SIZE(come) >= hook.params;
  if (arrivals.is_last) arrivals.expected = -1;  // by the next call this gradient has been added, and Python is told
}

// Called by autograd: (gradients of the node's inputs) -> None
PyObject* arrives(PyObject* self, PyObject* gradients) {
  try {
    const Hook& hook = *static_cast<const Hook*>(PyCapsule_GetPointer(self, kHook));
    if (!is_expected(hook)) hook.prepare(hook.index);
    if (hook.arrival_sets.size() == 2) note(hook, !py::reinterpret_borrow<py::tuple>(gradients)[0].is_none());
    Py_RETURN_NONE;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyMethodDef hook_definition = {"arrival_hook", arrives, METH_O, nullptr};

py::object make_hook(std::shared_ptr<Arrivals> arrivals, int group, Py_ssize_t params, py::int_ index,
                     py::list arrival_sets, py::object prepare) {
  auto hook = std::make_unique<Hook>(Hook{std::move(arrivals), group, params, index, arrival_sets, prepare});
  const py::capsule self(hook.release(), kHook,
                         [](PyObject* capsule) { delete static_cast<Hook*>(PyCapsule_GetPointer(capsule, kHook)); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&hook_definition, self.ptr()));
}

bool elsewhere(const Arrivals& arrivals) { return arrivals.thread != PyThread_get_thread_ident(); }

int take_complete(Arrivals& arrivals) {
  if (elsewhere(arrivals) || !std::exchange(arrivals.is_last, false)) return -1;
  return arrivals.adding;
}

int adding_elsewhere(const Arrivals& arrivals) { return elsewhere(arrivals) ? arrivals.adding : -1; }

// Returns the addresses of the values of several dicts, concatenated.
py::bytes addresses(const py::list& dicts) {
  std::string found;
  for (const py::handle dict : dicts) {
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(dict.ptr(), &at, nullptr, &value);)
      found.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  return py::bytes(found);
}

void end(Arrivals& arrivals) {
  arrivals.expected = arrivals.adding = -1;
  arrivals.is_last = false;
}

std::uint32_t crc32c_of(const py::buffer& data, std::uint32_t before, bool by_instruction) {
  Py_buffer view;
  if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) throw py::error_already_set();
  const ScopeExit release([&view] { PyBuffer_Release(&view); });
  const py::gil_scoped_release unlocked;
  return crc32c(view.buf, static_cast<std::size_t>(view.len), before, by_instruction);
}

}  // namespace

void define_training(py::module_& m) {
  m.def("crc32c", &crc32c_of, py::arg("data"), py::arg("before") = 0, py::arg("by_instruction") = true);
  m.def("addresses", &addresses, py::arg("dicts"));
  py::class_<Arrivals, std::shared_ptr<Arrivals>>(m, "Arrivals")
      .def(py::init([](py::object current_task) { return std::make_shared<Arrivals>(Arrivals{current_task}); }),
           py::arg("current_task"))
      .def_readwrite("expected", &Arrivals::expected)
      .def("take_complete", &take_complete)
      .def("adding_elsewhere", &adding_elsewhere)
      .def("end", &end)
      .def("hook", &make_hook, py::arg("group"), py::arg("params"), py::arg("index"), py::arg("arrival_sets"),
           py::arg("prepare"));
}

}  // namespace ringcomm
