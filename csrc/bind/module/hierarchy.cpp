// Engines over several hosts, made of an engine inside this host and a transport between hosts.
#include <pybind11/stl.h>

#include "bind/capsule.h"
#include "bind/module/define.h"
#include "core/error.h"
#include "hierarchy/engine.h"
#include "hierarchy/topology.h"
#include "runtime/observe/recording_engine.h"

namespace py = pybind11;

namespace ringcomm {

namespace {

std::shared_ptr<Engine> hierarchical_engine(const std::shared_ptr<Engine>& local, const py::capsule& transport,
                                            int rank, const HostsOfRanks& hosts, const std::vector<std::string>& names,
                                            int wire_dtype, std::size_t slice_bytes) {
  hierarchy::Options options;
  options.compressed = wire_dtype >= 0;
  if (options.compressed) options.wire = static_cast<DType>(wire_dtype);
  options.names = names;
  options.slice_bytes = slice_bytes;
  return share_beside_python(
      record(make_hierarchical_engine(rank, hosts, unrecorded(local), from_capsule<Transport>(transport), options)));
}

// Returns (order, schedule, tree): how the ranks' values are added by default.
py::tuple order_over(const HostsOfRanks& hosts) {
  const hierarchy::Topology topology(0, hosts);
  py::list tree;
  for (const hierarchy::Merge& merge : topology.tree()) tree.append(py::make_tuple(merge.into, merge.from));
  return py::make_tuple(topology.order(), name(topology.in_order()), tree);
}

}  // namespace

void define_hierarchy(py::module_& m) {
  m.def(
      "hierarchical_engine", &hierarchical_engine, py::arg("local"), py::arg("transport"), py::arg("rank"),
      py::arg("hosts"), py::arg("names"), py::arg("wire_dtype") = -1, py::arg("slice_bytes") = 0,
      "An engine of all ranks, of the ranks' engine on this host and a transport between hosts. `hosts`: the ranks of "
      "each, in the order of their lowest ranks; `names` likewise; `wire_dtype`: what floats are sent as, -1: as they "
      "are.");
  m.def("order_over", &order_over, py::arg("hosts"),
        "(order, schedule between hosts, additions of hosts in turn) that ranks on these hosts get.");
}

}  // namespace ringcomm
