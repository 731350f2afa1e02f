// Chooses the algorithm for a call of some size: from a small built-in table, or from a file that RINGCOMM_TUNING names
// and `ringcomm tune` writes. The file is plain text. It begins with the device and the links that it was measured on,
// then has one line per entry; # begins a comment:
//
//   device NVIDIA H200
//   links nvlink
//   # op          world_size  up_to_bytes  algorithm  channels  threads     (0: the engine's choice)
//   all_reduce    4           65536        oneshot    8         256
//   all_reduce    4           max          direct     0         0
//
// A message of n bytes uses the entry of its op and world size with the smallest up_to_bytes >= n. The bytes are those
// of the whole message (reduce_scatter, all_gather: of all parts). An algorithm that would change the bits of a
// reduction (ring) is refused, because auto must not change them. A file that was measured on another device or over
// other links is refused too; a file without these two lines is valid everywhere.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/engine.h"
#include "cuda/memory/topology.h"

namespace ringcomm::cuda {

class Tuning {
 public:
  struct Entry {
    Op op;
    int world_size;
    std::uint64_t up_to_bytes;
    Algorithm algorithm;
    int channels, threads;
  };

  // Only the built-in choice.
  Tuning() = default;
  // `source` is for errors: the name of the file.
  static Tuning parse(const std::string& text, const std::string& source);
  // The file that RINGCOMM_TUNING names, if any.
  static Tuning from_environment();

  // Returns null where the choice is the engine's.
  const Entry* find(Op op, int world_size, std::uint64_t nbytes) const;
  const std::string& source() const { return source_; }
  // The largest number of channels that an entry asks for, if it is above the engine's usual one; else 0.
  int most_channels() const;
  // Whether an entry is for this many ranks, two or more.
  bool serves(int world_size) const;
  // Covers the whole content of the file, so that ranks can compare their files.
  std::uint64_t checksum() const;
  // Throws if the entries were measured on another device or over other links than these. Ranks that do not see each
  // other's devices do not know their links, and check only the device.
  void check_measured_on(const std::string& device, Path::Kind links, int rank) const;
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::string source_ = "built in", device_, links_;  // empty: the file does not say
  std::vector<Entry> entries_;                        // by op, world size, bytes
};

}  // namespace ringcomm::cuda
