// The work of one rank between hosts in a call, in rounds: local steps, and messages to send and receive. Built from
// the schedules of core/inter_host_schedule.h; executed by run_plans.
#pragma once

#include <functional>
#include <variant>
#include <vector>

#include "core/engine.h"
#include "core/inter_host_schedule.h"
#include "core/reduce.h"
#include "hierarchy/topology.h"
#include "hierarchy/transport.h"

namespace ringcomm::hierarchy {

inline constexpr int kSlots = kSlicing.slots;  // plans of a rail that are in flight at once

// Rounds a size up, so that the next data begins at a cache line.
inline std::size_t aligned(std::size_t nbytes) { return ceil_div(nbytes, 64) * 64; }

// The local computations of this rank, in order.
using LocalSteps = std::vector<std::variant<PackCall, CombineCall>>;

struct ExchangeRound {
  LocalSteps before;
  Round messages;
  LocalSteps after;
};

using ExchangePlan = std::vector<ExchangeRound>;

// A rail of a message: the locations of its chunks, one chunk for each host.
class Chunks {
 public:
  Chunks() = default;
  // A contiguous message, cut into windows of `hosts` slices.
  static Chunks whole(void* data, std::size_t count, int hosts, std::size_t slice_elements, std::size_t element);
  // A separate part for each host.
  static Chunks pieces(std::vector<Part> parts, std::size_t slice_elements, std::size_t element);

  std::size_t windows() const { return cut_.windows(); }
  // Whether neighbouring chunks of a window are also neighbours in memory.
  bool in_one_piece() const { return cut_.chunks > 1; }
  // The largest number of elements of a chunk in a window.
  std::size_t slice_elements() const { return cut_.slice_elements; }
  Part at(int chunk, std::size_t window) const;

 private:
  std::vector<Part> parts_;
  WindowCut cut_{};
  std::size_t element_ = 1;
};

// The types of sums, of results, and the smaller type that replaces either on the wire.
struct WireTypes {
  DType sum, result;
  bool compressed = false;
  DType wire = DType::kBFloat16;

  // float8 replaces float32 only.
  DType of(DType type) const {
    const bool smaller = compressed && is_float(type) && element_bytes(wire) < element_bytes(type);
    return smaller && (element_bytes(wire) > 1 || type == DType::kFloat32) ? wire : type;
  }
};

// One rail's share of a reduction or an all-gather.
struct Rail {
  int number;
  std::vector<int> ranks;  // one for each host
  InterHostSchedule schedule;
  bool reduces, gathers;
  ReduceOp op = ReduceOp::kSum;
  int divisor = 1;
  WireTypes types{};
  Chunks sums;     // memory of the sums, of type `types.sum`
  Chunks results;  // memory of the results, of type `types.result`; the same memory if the types are equal
};

// The scratch memory that a plan of the rail needs, in bytes; the same for every window.
std::size_t scratch_bytes(const Rail& rail);
ExchangePlan build_plan(const Topology& topology, const Rail& rail, std::size_t window, char* scratch,
                        std::uintptr_t stream);
// One window of an undivided message, which travels along the hosts from `root_host` on.
ExchangePlan build_chain(const Topology& topology, const std::vector<int>& rail_ranks, int root_host, void* data,
                         std::size_t nbytes);

struct RailPlans {
  int rail;
  std::size_t windows;
  int rounds;
  std::size_t scratch_bytes;  // for each plan
  std::function<ExchangePlan(std::size_t window, char* scratch)> build;
};

// Executes lists of plans that all have the same number of rounds, kSlots of each at once. `scratch` has kSlots *
// scratch_bytes for each list in turn.
void run_plans(Engine& local, Transport& transport, const std::vector<RailPlans>& lists, char* scratch,
               TransportClock::time_point limit, std::uintptr_t stream);

}  // namespace ringcomm::hierarchy
