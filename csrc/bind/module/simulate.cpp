// The simulator for Python: takes and returns plain numbers.
#include "core/simulation/model.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>

#include "core/error.h"

namespace py = pybind11;

namespace ringcomm {

namespace {

using Numbers = std::vector<double>;
using Link = std::tuple<double, double, double, double, std::size_t, std::size_t, int, std::size_t, bool>;

// The value of that name.
template <typename Value, std::size_t kCount>
Value chosen(const Value (&values)[kCount], const std::string& text, const char* what) {
  std::string known;
  for (const Value value : values) {
    if (text == name(value)) return value;
    known += (known.empty() ? "" : ", ") + std::string(name(value));
  }
  fail(ErrorCode::kInvalid, "simulate: got ", what, " '", text, "', expected one of ", known, "; pass one of these");
}

constexpr Op kCollectives[] = {Op::kAllReduce, Op::kReduceScatter, Op::kAllGather, Op::kBroadcast, Op::kAllToAll};
constexpr InterHostSchedule kBetween[] = {InterHostSchedule::kRing, InterHostSchedule::kButterfly,
                                          InterHostSchedule::kDirect};
constexpr Algorithm kInside[] = {Algorithm::kRing, Algorithm::kDirect, Algorithm::kOneshot};

simulation::LinkClass link_of(const Link& link) {
  const auto& [latency_us, bandwidth_gbps, overhead_us, reduce_gbps, slice_bytes, least_slice_bytes, slots, wave_bytes,
               agrees] = link;
  return {latency_us,        bandwidth_gbps, overhead_us, reduce_gbps, slice_bytes,
          least_slice_bytes, slots,          wave_bytes,  agrees};
}

py::dict simulate(const std::string& collective, const std::string& between, const std::string& inside, bool flat,
                  int hosts, int ranks_per_host, std::size_t count,
                  const std::tuple<std::size_t, std::size_t, std::size_t, std::size_t>& element_bytes,
                  const Link& inside_link, const Link& between_link, bool shared_nic, Numbers link_share,
                  Numbers start_us, Numbers slowdown, int root_host, bool fold) {
  const simulation::Cluster cluster{hosts,      ranks_per_host,        link_of(inside_link), link_of(between_link),
                                    shared_nic, std::move(link_share), std::move(start_us),  std::move(slowdown)};
  const auto& [element, partial, sum, result] = element_bytes;
  const simulation::CollectiveCall call{chosen(kCollectives, collective, "collective"),
                                        chosen(kBetween, between, "schedule between hosts"),
                                        chosen(kInside, inside, "algorithm inside"),
                                        flat,
                                        root_host,
                                        count,
                                        element,
                                        partial,
                                        sum,
                                        result,
                                        fold};
  simulation::Prediction prediction;
  {
    const py::gil_scoped_release release;
    prediction = simulation::simulate(cluster, call);
  }
  py::dict found;
  found["time_us"] = prediction.time_us;
  found["first_us"] = prediction.first_us;
  found["inside_bytes"] = prediction.inside_bytes;
  found["between_bytes"] = prediction.between_bytes;
  found["messages"] = prediction.messages;
  found["events"] = prediction.events;
  found["folded"] = prediction.folded;
  return found;
}

}  // namespace

void define_simulate(py::module_& m) {
  m.def("simulate", &simulate, py::kw_only(), py::arg("collective"), py::arg("between"), py::arg("inside"),
        py::arg("flat"), py::arg("hosts"), py::arg("ranks_per_host"), py::arg("count"), py::arg("element_bytes"),
        py::arg("inside_link"), py::arg("between_link"), py::arg("shared_nic"), py::arg("link_share"),
        py::arg("start_us"), py::arg("slowdown"), py::arg("root_host"), py::arg("fold"),
        "When the ranks of a collective are done, by the model of core/simulation/model.h; for ringcomm.simulate.");
  py::dict slicing;
  slicing["slice_bytes"] = kSlicing.most;
  slicing["least_slice_bytes"] = kSlicing.least;
  slicing["slots"] = kSlicing.slots;
  m.attr("BETWEEN_SLICES") = slicing;  // the cut of messages between hosts
}

}  // namespace ringcomm
