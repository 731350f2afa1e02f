// The one switch from run-time (dtype, reduce op) to templates. `RINGCOMM_ONLY_DTYPE` / `RINGCOMM_ONLY_OP` build a
// single pair, which shortens the edit-compile loop: cmake -DRINGCOMM_ONLY="float32:sum".
#pragma once

#include "core/reduce.h"

namespace ringcomm {

// Not inline, because this header is compiled for several instruction sets: the linker might otherwise choose a copy
// that was compiled for another one.
[[noreturn]] void not_in_this_build(DType dtype, ReduceOp op);

// Calls body(Element<T>).
template <typename F>
void dispatch_dtype(DType dtype, F&& body) {
  switch (dtype) {
#define X(e, type, text) \
  case DType::e:         \
    return body(Element<type>{});
#if defined(RINGCOMM_ONLY_DTYPE)
#define RINGCOMM_PICK_DTYPE(e) DType::e == DType::RINGCOMM_ONLY_DTYPE
#undef X
#define X(e, type, text)                                                \
  case DType::e:                                                        \
    if constexpr (RINGCOMM_PICK_DTYPE(e)) return body(Element<type>{}); \
    break;
#endif
    RINGCOMM_FOR_EACH_DTYPE(X)
#undef X
    default:  // a type that is only moved
      break;
  }
  not_in_this_build(dtype, ReduceOp::kSum);
}

// Calls body(Element<T>, ReduceStep) for a supported pair.
template <typename F>
void dispatch_reduce(DType dtype, ReduceOp op, F&& body) {
  dispatch_dtype(dtype, [&](auto element) {
    constexpr bool kBits = std::is_integral_v<typename decltype(element)::Acc>;
    switch (combine_of(op)) {
#define X(e)                                                                                          \
  case ReduceOp::e:                                                                                   \
    if constexpr (kBits || !is_bitwise(ReduceOp::e)) return body(element, ReduceStep<ReduceOp::e>{}); \
    break;
#if defined(RINGCOMM_ONLY_OP)
#undef X
#define X(e)                                                                                                    \
  case ReduceOp::e:                                                                                             \
    if constexpr (ReduceOp::e == combine_of(ReduceOp::RINGCOMM_ONLY_OP) && (kBits || !is_bitwise(ReduceOp::e))) \
      return body(element, ReduceStep<ReduceOp::e>{});                                                          \
    break;
#endif
      RINGCOMM_FOR_EACH_STEP(X)
#undef X
      default:
        break;
    }
    not_in_this_build(dtype, op);
  });
}

}  // namespace ringcomm
