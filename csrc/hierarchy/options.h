// The options of an engine over hosts.
#pragma once

#include <string>
#include <vector>

#include "core/types.h"

namespace ringcomm::hierarchy {

struct Options {
  bool compressed = false;         // send floats between hosts in a smaller type
  DType wire = DType::kBFloat16;   // the smaller type
  std::vector<std::string> names;  // of the hosts, in the order of their lowest ranks, for messages
  std::size_t slice_bytes = 0;     // the largest message between hosts; 0: the engine's choice
};

}  // namespace ringcomm::hierarchy
