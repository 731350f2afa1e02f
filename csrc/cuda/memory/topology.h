// The paths between devices, and the ring order that follows from them.
#pragma once

#include <cstdint>
#include <vector>

namespace ringcomm::cuda {

// The path from one device to another; kinds from worst to best.
struct Path {
  enum Kind : std::uint8_t { kUnknown, kNone, kPcie, kNvlink, kSame };
  Kind kind = kUnknown;
  int performance_rank = 0;  // CUDA's value: 0 is the fastest kind of link in the machine

  // Higher is better; any path of a better kind beats any of a worse one.
  int quality() const { return kind * 1000 - (performance_rank < 999 ? performance_rank : 999); }
};
const char* name(Path::Kind kind);

// Returns CUDA's report about two devices that this process sees.
Path path_between(int from, int to, int rank);

// A ring through all ranks, as a list of ranks that begins with 0. paths[a][b] is the path from rank a to rank b; a
// link counts as its worse direction. Up to 8 ranks every order is tried: the result has the best worst link, then the
// largest sum of its links, then it is the first in lexical order. More ranks are ordered by nearest neighbours, then
// improved by reversing parts of the ring, which need not find the best. The identity if a path is unknown.
std::vector<int> ring_order(const std::vector<std::vector<Path>>& paths);

}  // namespace ringcomm::cuda
