// A call's memory as byte addresses: one contiguous message, or a part at any address for each rank.
#pragma once

#include "core/engine.h"
#include "core/link.h"

namespace ringcomm {

class Parts {
 public:
  Parts(const void* base, std::size_t count, const std::vector<Part>& list, std::size_t element)
      : base_(static_cast<char*>(const_cast<void*>(base))), count_(count), list_(list), element_(element) {}

  char* data(int rank) const {
    return list_.empty() ? base_ + rank * count_ * element_ : static_cast<char*>(list_[rank].data);
  }
  std::size_t count(int rank) const { return list_.empty() ? count_ : list_[rank].count; }
  bool contiguous() const { return list_.empty(); }
  // The number of elements of the longest of `world_size` parts.
  std::size_t longest(int world_size) const {
    std::size_t most = 0;
    for (int r = 0; r < world_size; ++r) most = count(r) > most ? count(r) : most;
    return most;
  }
  std::size_t total(int world_size) const {
    std::size_t sum = 0;
    for (int r = 0; r < world_size; ++r) sum += count(r);
    return sum;
  }
  // Returns the count that the ranks compare: the total of equal parts, or kUneven with a hash of the sizes.
  std::uint64_t agreed(int world_size) const {
    std::uint64_t hash = 0;
    bool equal = true;
    for (int r = 0; r < world_size; ++r) {
      hash = (hash ^ count(r)) * 0xbf58476d1ce4e5b9u;
      hash ^= hash >> 29;
      equal = equal && count(r) == count(0);
    }
    return equal ? total(world_size) : hash | kUneven;
  }

 private:
  char* base_;
  std::size_t count_;
  const std::vector<Part>& list_;
  std::size_t element_;
};

inline Parts input_parts(const Call& call) {
  return {call.input, call.count, call.input_parts, element_bytes(call.dtype)};
}
inline Parts output_parts(const Call& call) {
  return {call.output, call.count, call.output_parts, element_bytes(call.dtype)};
}

inline bool reduces(Op op) { return op == Op::kAllReduce || op == Op::kReduceScatter || op == Op::kReduce; }
inline bool rooted(Op op) {
  return op == Op::kBroadcast || op == Op::kReduce || op == Op::kGather || op == Op::kScatter;
}
// Ops that have a mark for a root: a number that the caller chooses, and that is the same on all ranks.
inline bool marked(Op op) { return op == Op::kAllGather || op == Op::kAllToAll || op == Op::kBarrier; }
// The root in the signature of a collective.
inline int agreed_root(const Call& call) { return rooted(call.op) || marked(call.op) ? call.root : 0; }
inline bool point_to_point(Op op) { return op == Op::kSend || op == Op::kRecv || op == Op::kProbe; }

// Whether the ranks have to tell each other the sizes that they send. This includes an empty call, because the calls of
// the other ranks may still be uneven.
inline bool uneven_all_to_all(const Call& call) {
  return !call.input_parts.empty() || !call.output_parts.empty() || call.count == 0;
}

}  // namespace ringcomm
