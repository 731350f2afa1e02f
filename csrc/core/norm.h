// Sums of squares whose bits depend on the values only, not on their order, nor on how they are spread over buffers,
// threads and ranks. Every square, scaled below 1, is split into a multiple of 2^-45, a multiple of 2^-91 and a rest of
// at most 2^-92, which is dropped. Multiples are added exactly, first as doubles, then as integers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/types.h"

namespace ringcomm {

constexpr int kFoldBits[2] = {45, 91};     // the exponents of the multiples: 2^-45 and 2^-91
constexpr int kFoldRun = 256;              // this many multiples, each at most 2^45, have an exact sum in a double
constexpr int kLimbBits = 30;              // the sum of a run is split into high * 2^30 + low
constexpr std::size_t kFoldLimbs = 2 * 2;  // high and low of the multiples of 2^-45, then of 2^-91

struct Part;  // see core/engine.h

// Returns the largest magnitude; NaN if a value is NaN; 0 without elements. float32, float64, float16, bfloat16.
double abs_max(const std::vector<Part>& parts, DType dtype);
// Returns the sums of (x / 2^exponent)^2 for finite x with |x| < 2^exponent, as kFoldLimbs limbs. The same types. The
// limbs of one value may depend on the order; high * 2^30 + low does not.
std::vector<std::int64_t> fold_sums(const std::vector<Part>& parts, DType dtype, int exponent);

}  // namespace ringcomm
