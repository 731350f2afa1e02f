// Arguments of the known kernels: reductions of messages whose addresses the launch knows and whose values are ready.
#pragma once

#include <cstdint>

#include "cuda/device/args.h"

namespace ringcomm::cuda {

inline constexpr int kKnownAddresses = 128;

// The addresses of message m begin at address[m * (num_sources + num_targets)]: its sources, then its targets. The
// reduction over all sources goes to all targets, unless it `scatters`: then part y, which blocks (x, y) serve, begins
// y * count elements into each source and goes to target y alone.
struct KnownArgs {
  std::int32_t num_sources, num_targets;
  std::int32_t num_messages;
  std::int32_t scatters;
  std::int32_t divisor;  // of sums; 1: none
  std::int32_t scaled;   // values of source p are multiplied by factor[p]
  double factor[kMaxLaunchRanks];
  std::uint64_t count[kMaxMessages];  // elements of the kernel's type
  char* address[kKnownAddresses];

  RINGCOMM_HD constexpr int each() const { return num_sources + num_targets; }
  constexpr bool full() const { return num_messages == kMaxMessages || (num_messages + 1) * each() > kKnownAddresses; }
  void add(const void* const* sources, void* const* targets, std::uint64_t elements) {
    char** const at = address + num_messages * each();
    for (int p = 0; p < num_sources; ++p) at[p] = static_cast<char*>(const_cast<void*>(sources[p]));
    for (int t = 0; t < num_targets; ++t) at[num_sources + t] = static_cast<char*>(targets[t]);
    count[num_messages++] = elements;
  }
};
static_assert(2 * kMaxLaunchRanks <= kKnownAddresses, "a message does not fit");

}  // namespace ringcomm::cuda
