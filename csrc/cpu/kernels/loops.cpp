#include "cpu/kernels/loops.h"

#include <cstdlib>
#include <cstring>

#include "core/error.h"

namespace ringcomm::cpu {

namespace baseline {
extern const Kernels kTable;
}
#if defined(RINGCOMM_HAVE_X86_VARIANTS)
namespace avx2 {
extern const Kernels kTable;
}
namespace avx512 {
extern const Kernels kTable;
}
#endif

std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> usable;
#if defined(RINGCOMM_HAVE_X86_VARIANTS)
  __builtin_cpu_init();
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx512) usable.push_back(&avx512::kTable);
  if (has_avx2) usable.push_back(&avx2::kTable);
#endif
  usable.push_back(&baseline::kTable);
  return usable;
}

namespace {

const Kernels& pick() {
  const char* wanted = std::getenv("RINGCOMM_ISA");
  for (const Kernels* table : usable_kernels())
    if (!wanted || !std::strcmp(wanted, table->isa)) return *table;
  fail(ErrorCode::kUnsupported, "RINGCOMM_ISA=", wanted,
       " is not among the instruction sets of this build and processor; unset it to use the best one");
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = pick();
  return chosen;
}

}  // namespace ringcomm::cpu
