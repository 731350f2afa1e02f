// Checks a call before anything is sent; the same for every engine.
#pragma once

#include <cstdint>

#include "core/engine.h"

namespace ringcomm {

// Throws an error that says why the engine cannot be used: it is closed, not connected, or this process was
// forked after it was made.
[[noreturn]] void report_unusable(const char* call, int rank, bool closed, bool forked);
// Throws the error of a wait of `timeout_ms` for an asynchronous call that has not ended.
[[noreturn]] void report_in_flight(Op op, int rank, std::int64_t timeout_ms);

// Each throws unless its argument is valid on this rank.
void check_call(const Call& call, int rank, int world_size);
// For engines that are not one host's GPUs, which alone have the algorithm copy_engine.
void check_no_copy_engine(const Call& call, int rank);
void check_packing(const PackCall& packing, int rank);
// Whether `pack` can multiply this type by a factor, and convert it from and to all other types that return true.
constexpr bool can_cast(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat64 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}
void check_combining(const CombineCall& combining, int rank);

// The count that all ranks must agree on: the elements of the message, or of one part; for uneven parts the total.
std::uint64_t agreed_count(const Call& call, int world_size);

}  // namespace ringcomm
