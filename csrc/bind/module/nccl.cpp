// The transport over NCCL, and the facts about NCCL on this machine.
#include <pybind11/stl.h>

#include "bind/capsule.h"
#include "bind/module/define.h"

namespace py = pybind11;

namespace ringcomm {

namespace {

py::capsule nccl_transport(const std::string& path, int rank, int world_size, const std::vector<py::bytes>& unique_ids,
                           int device, std::int64_t timeout_ms) {
  NcclOptions options;
  options.path = path;
  options.rank = rank;
  options.world_size = world_size;
  for (const py::bytes& id : unique_ids) options.unique_ids.push_back(id);
  options.device = device;
  if (timeout_ms > 0) options.timeout_ms = timeout_ms;
  std::shared_ptr<Transport> transport;
  {
    const py::gil_scoped_release release;
    transport = make_nccl_transport(options);
  }
  return to_capsule(std::move(transport));
}

py::bytes unique_id(const std::string& path) {
  std::string id;
  {
    const py::gil_scoped_release release;
    id = nccl_unique_id(path);
  }
  return py::bytes(id);
}

}  // namespace

void define_nccl(py::module_& m) {
  m.attr("NCCL_IDS") = kNcclIds;
  m.def("nccl_transport", &nccl_transport, py::arg("path"), py::arg("rank"), py::arg("world_size"),
        py::arg("unique_ids"), py::arg("device"), py::arg("timeout_ms") = 0,
        "A transport of all ranks over the NCCL library at `path` (empty: one that is loaded, else what the loader "
        "finds), a collective call. `unique_ids`: NCCL_IDS of them, made by one rank.");
  m.def("nccl_unique_id", &unique_id, py::arg("path"), "An id for one rank to make and all to know: 128 bytes.");
  m.def("why_no_nccl", &why_no_nccl, py::arg("path"), py::call_guard<py::gil_scoped_release>(),
        "Why the NCCL library at `path` cannot be used, in one sentence; empty if it can.");
  m.def("nccl_version", &nccl_version, py::arg("path"), py::call_guard<py::gil_scoped_release>(), "Such as 2.30.7.");
}

}  // namespace ringcomm
