// Arguments of the bucket kernels, which copy a list of tensors into one bucket, or back, with a cast and a factor.
#pragma once

#include <cstdint>

namespace ringcomm::cuda {

inline constexpr int kMaxPieces = 160;

// Both directions are a list of copies: element i of piece p goes from source[p] to target[p], times `factor`.
struct PackArgs {
  double factor;
  std::int32_t num_pieces;
  std::int32_t scaled;  // 0: factor is 1, and equal types are copied bit for bit
  const char* source[kMaxPieces];
  char* target[kMaxPieces];
  std::uint64_t end[kMaxPieces];  // running total of the kernel's elements: piece p has end[p] - end[p - 1]
};
static_assert(sizeof(PackArgs) <= 4096, "kernel arguments have 4 KiB");

}  // namespace ringcomm::cuda
