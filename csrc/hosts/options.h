// What the user of an engine over hosts may choose.
#pragma once

#include <string>
#include <vector>

#include "core/types.h"

namespace ringcomm::hosts {

struct HostsOptions {
  bool compressed = false;         // send floats between hosts in a smaller type
  DType wire = DType::kBFloat16;   // this one
  std::vector<std::string> names;  // of the hosts, in the order of their lowest ranks, for people
  std::size_t slice_bytes = 0;     // most of one message between hosts; 0: the engine's choice
};

}  // namespace ringcomm::hosts
