#include "core/norm.h"

#include <cmath>

#include "core/engine.h"
#include "core/error.h"
#include "cpu/kernels/loops.h"

namespace ringcomm {
namespace {

void check(const char* call, DType dtype) {
  if (dtype > DType::kBFloat16)
    fail(ErrorCode::kInvalid, call, ": got ", name(dtype),
         ", expected float32, float64, float16 or bfloat16; convert first");
}

}  // namespace

double abs_max(const std::vector<Part>& parts, DType dtype) {
  check("abs_max", dtype);
  double largest = 0;
  for (const Part& part : parts) {
    const double here = cpu::kernels().abs_max(part.data, part.count, dtype);
    if (here > largest || std::isnan(here)) largest = here;
    if (std::isnan(largest)) break;
  }
  return largest;
}

std::vector<std::int64_t> fold_sums(const std::vector<Part>& parts, DType dtype, int exponent) {
  check("fold_sums", dtype);
  std::vector<std::int64_t> limbs(kFoldLimbs);
  for (const Part& part : parts) cpu::kernels().fold(part.data, part.count, dtype, exponent, limbs.data());
  return limbs;
}

}  // namespace ringcomm
