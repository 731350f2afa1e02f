// Memory of a communicator for torch's allocator; see core/pool.h.
#include "core/pool.h"

#include "bind/module/define.h"

namespace py = pybind11;

namespace ringcomm {

void define_pool(py::module_& m) {
  m.def("open_pool", &open_pool, py::arg("engine"), py::arg("nbytes"), py::arg("device"),
        py::call_guard<py::gil_scoped_release>(),
        "The number N of a new pool, which ringcomm_pool_allocate_N and ringcomm_pool_free_N of this library serve.");
  m.def("close_pool", &close_pool, py::arg("number"), py::call_guard<py::gil_scoped_release>(),
        "Its memory goes back once all of it has been freed.");
  m.def("give_back_pools", &give_back_pools, py::call_guard<py::gil_scoped_release>(),
        "Gives the memory of closed pools that nobody uses any more back to their engines.");
}

}  // namespace ringcomm
