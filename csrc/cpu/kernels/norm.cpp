#include "cpu/kernels/norm.h"

#include <cmath>
#include <cstring>

#include "core/error.h"
#include "cpu/kernels/loops.h"

namespace ringcomm::cpu {

namespace baseline {
extern const NormKernels kNormTable;
}
#if defined(RINGCOMM_HAVE_X86_VARIANTS)
namespace avx2 {
extern const NormKernels kNormTable;
}
namespace avx512 {
extern const NormKernels kNormTable;
}
#endif

const NormKernels& norm_kernels() {
#if defined(RINGCOMM_HAVE_X86_VARIANTS)
  for (const NormKernels* table : {&avx512::kNormTable, &avx2::kNormTable})
    if (!std::strcmp(table->isa, kernels().isa)) return *table;
#endif
  return baseline::kNormTable;
}

}  // namespace ringcomm::cpu

namespace ringcomm {
namespace {

void check(const char* call, DType dtype) {
  if (dtype > DType::kBFloat16)
    fail(ErrorCode::kInvalid, call, ": got ", name(dtype),
         ", expected float32, float64, float16 or bfloat16; convert first");
}

}  // namespace

double abs_max(const std::vector<Span>& spans, DType dtype) {
  check("abs_max", dtype);
  double largest = 0;
  for (const Span& span : spans) {
    const double here = cpu::norm_kernels().abs_max(span, dtype);
    if (here > largest || std::isnan(here)) largest = here;
    if (std::isnan(largest)) break;
  }
  return largest;
}

FoldSums fold_sums(const std::vector<Span>& spans, DType dtype, int exponent) {
  check("fold_sums", dtype);
  FoldSums sums;
  for (const Span& span : spans) cpu::norm_kernels().fold(span, dtype, exponent, sums);
  return sums;
}

}  // namespace ringcomm
